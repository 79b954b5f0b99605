#!/usr/bin/env python3
"""Writes tests/golden/json_schema/: cases of the JSON Schema Test Suite, and schemas with documents judged by jsonschema.

    pip install jsonschema==4.26.0
    pip download --no-binary :all: --no-deps jsonschema==4.26.0     # its source archive holds the suite in json/
    python3 scripts/golden/json_schema.py jsonschema-4.26.0/json tests/golden/json_schema

Output is the same on every run.
"""
import copy
import json
import os
import random
import string
import sys

import jsonschema

# The files whose keywords are supported, wholly or in part.
FILES = [
    "additionalProperties", "allOf", "anyOf", "boolean_schema", "const", "default", "enum", "exclusiveMaximum",
    "exclusiveMinimum", "infinite-loop-detection", "items", "maxItems", "maxLength", "maxProperties", "maximum", "minItems",
    "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf", "pattern", "prefixItems", "properties", "ref",
    "required", "type", "uniqueItems", "if-then-else", "contains", "patternProperties",
]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "uri", "uuid"]


# Schemas of the kinds that applications send, for documents made at random.
SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
     "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 4}},
     "required": ["name", "age"], "additionalProperties": False},
    {"type": "object", "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0, "maximum": 10}},
     "required": ["kind", "radius"], "additionalProperties": False},
    {"$defs": {"node": {"type": "object", "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3}},
     "required": ["value"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
    {"type": "object", "properties": {"shape": {"anyOf": [
        {"type": "object", "properties": {"type": {"const": "square"}, "side": {"type": "integer", "minimum": 1}}, "required": ["type", "side"], "additionalProperties": False},
        {"type": "object", "properties": {"type": {"const": "text"}, "body": {"type": "string", "minLength": 1}}, "required": ["type", "body"], "additionalProperties": False},
        {"type": "null"}]}}, "required": ["shape"], "additionalProperties": False},
    {"type": "array", "prefixItems": [{"type": "string", "enum": ["a", "b\"c", "\u00e9\n"]}, {"type": "boolean"}], "items": {"type": ["integer", "null"]}, "minItems": 2, "maxItems": 5},
    {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"}, "when": {"type": "string", "format": "date"},
     "price": {"type": "number", "minimum": 0, "multipleOf": 0.25}}, "required": ["id", "when", "price"], "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": -5, "maximum": 5}, "minProperties": 1, "maxProperties": 3},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
               {"properties": {"a": {"maximum": 20, "multipleOf": 4}, "b": {"type": "string", "minLength": 2, "maxLength": 3}}}],
     "type": "object", "required": ["b"]},
    {"oneOf": [{"type": "object", "properties": {"op": {"const": "add"}, "by": {"type": "integer"}}, "required": ["op", "by"], "additionalProperties": False},
               {"type": "object", "properties": {"op": {"const": "clear"}}, "required": ["op"], "additionalProperties": False}]},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "integer", "minimum": -17, "maximum": 2000, "multipleOf": 3},
    {"enum": ["yes", "no", 3, None, {"k": [1, "x"]}, [True, 0.5]]},
    {"type": "object", "properties": {"a b": {"type": "boolean"}, "c\"d": {"type": "null"}, "\u00fc": {"type": "number", "minimum": -1.5, "maximum": 1.5}},
     "required": ["\u00fc"], "additionalProperties": False},
    {"type": "object", "properties": {"rows": {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 2}, "minItems": 1, "maxItems": 3}},
     "required": ["rows"], "additionalProperties": {"type": "string", "enum": ["x", "y"]}},
]


class Writer:
    """Documents of a schema, written as a grammar writes them: members in the order of the schema."""

    def __init__(self, root, r):
        self.root, self.r = root, r

    def text(self, low, high):
        letters = string.ascii_letters + " \u00e9\u20ac\U0001f600\"\\\n/"
        return "".join(self.r.choice(letters) for _ in range(self.r.randint(low, high)))

    def value(self, s, depth=0):
        r = self.r
        if "$ref" in s:
            at = self.root
            for key in s["$ref"].split("/")[1:]:
                at = at[key]
            return self.value(at, depth)
        if "allOf" in s:
            merged = {"type": "object", "properties": {}, "required": list(s.get("required", []))}
            for part in s["allOf"]:
                merged["required"] += part.get("required", [])
                for key, sub in part.get("properties", {}).items():
                    merged["properties"].setdefault(key, {}).update(sub)
            return self.value(merged, depth)
        for key in ("anyOf", "oneOf"):
            if key in s:
                return self.value(r.choice(s[key]), depth)
        if "const" in s:
            return s["const"]
        if "enum" in s:
            return r.choice(s["enum"])
        kind = s["type"] if isinstance(s["type"], str) else r.choice(s["type"])
        if kind == "null":
            return None
        if kind == "boolean":
            return r.random() < 0.5
        if kind == "integer":
            step = s.get("multipleOf", 1)
            low, high = s.get("minimum", -1000), s.get("maximum", 1000)
            return r.randint(-(-low // step), high // step) * step
        if kind == "number":
            step = s.get("multipleOf", 0.125)
            low, high = s.get("minimum", s.get("exclusiveMinimum", -50)), s.get("maximum", 50)
            n = r.randint(int(low / step), int(high / step))
            value = max(n, 1) * step if "exclusiveMinimum" in s else n * step
            return int(value) if value == int(value) and r.random() < 0.5 else value
        if kind == "string":
            if s.get("format") == "date":
                return "%04d-%02d-%02d" % (r.randint(1000, 9999), r.randint(1, 12), r.randint(1, 28))
            if "pattern" in s:
                return "".join(r.choice(string.ascii_uppercase) for _ in "ab") + "-" + str(r.randint(100, 9999))
            return self.text(s.get("minLength", 0), s.get("maxLength", 12))
        if kind == "array":
            first = s.get("prefixItems", [])
            n = r.randint(s.get("minItems", 0), min(s.get("maxItems", 3), 1 if depth > 4 else 5))
            return [self.value(first[i] if i < len(first) else s["items"], depth + 1) for i in range(max(n, s.get("minItems", 0)))]
        out = {}
        for key, sub in s.get("properties", {}).items():
            if key in s.get("required", []) or r.random() < 0.6:
                out[key] = self.value(sub, depth + 1)
        if isinstance(s.get("additionalProperties"), dict):
            while len(out) < s.get("minProperties", 0) or (len(out) < s.get("maxProperties", 4) and r.random() < 0.4):
                out["x" + self.text(0, 3)] = self.value(s["additionalProperties"], depth + 1)
        return out

    def spoiled(self, value):
        """The same with one thing changed, at a random place."""
        r = self.r
        value = copy.deepcopy(value)
        if isinstance(value, (dict, list)) and value and r.random() < 0.7:
            key = r.choice(list(value)) if isinstance(value, dict) else r.randrange(len(value))
            value[key] = self.spoiled(value[key])
            return value
        if isinstance(value, dict):
            if value and r.random() < 0.5:
                del value[r.choice(list(value))]
            else:
                value["zz" + self.text(0, 2)] = self.text(0, 2)
            return value
        if isinstance(value, list):
            return value + [value[0]] if value and r.random() < 0.5 else value[:-1] + ["odd"]
        return r.choice([None, True, -99999, 99999, 0.3, "", "odd text", [], {}])


def main():
    suite, out = sys.argv[1:]
    os.makedirs(out, exist_ok=True)
    cases = []
    base = os.path.join(suite, "tests", "draft2020-12")
    for name in FILES + ["optional/format/" + f for f in FORMATS]:
        with open(os.path.join(base, name + ".json"), encoding="utf-8") as source:
            for group in json.load(source):
                if isinstance(group["schema"], dict):
                    group["schema"].pop("$schema", None)
                format_of = name.split("/")[-1] if "/" in name else None
                tests = [{"description": t["description"], "data": t["data"], "valid": t["valid"]} for t in group["tests"]
                         if format_of is None or isinstance(t["data"], str)]
                for t in tests:  # the suite's verdicts, checked by a second judge where it has an opinion
                    if format_of is None and "$id" not in json.dumps(group["schema"]) and "http" not in json.dumps(group["schema"]):
                        valid = jsonschema.Draft202012Validator(group["schema"]).is_valid(t["data"])
                        assert valid == t["valid"], (name, group["description"], t)
                cases.append({"file": name, "description": group["description"], "schema": group["schema"], "tests": tests})
    with open(os.path.join(out, "suite.json"), "w", encoding="ascii") as target:
        target.write("[\n" + ",\n".join(json.dumps(c) for c in cases) + "\n]\n")

    r = random.Random(20)
    with open(os.path.join(out, "documents.jsonl"), "w", encoding="ascii") as target:
        for schema in SCHEMAS:
            judge = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
            writer = Writer(schema, r)
            valid, invalid = [], []
            while len(valid) < 40:
                document = writer.value(schema)
                if judge.is_valid(document):
                    valid.append(document)
            tries = 0
            while len(invalid) < 40 and tries < 4000:
                tries += 1
                document = writer.spoiled(r.choice(valid))
                if not judge.is_valid(document) and document not in invalid:
                    invalid.append(document)
            unique = list({json.dumps(d): d for d in valid}.values())
            target.write(json.dumps({"schema": schema, "valid": unique, "invalid": invalid}) + "\n")


main()
