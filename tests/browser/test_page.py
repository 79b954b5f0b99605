"""The chat page in a headless Chromium: ask, stream, stop, a tool call shown, HTML that does not run.

    python3 tests/browser/test_page.py [--lily build/release/lily] [--screenshots DIR]

Needs Debian's chromium and chromium-driver and the Python package selenium.
"""
import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import unittest

try:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait
except ImportError:
    print("test_page: skipped, the Python package selenium is missing")
    sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[2]
OPTIONS = argparse.Namespace()
WEATHER = json.dumps([{"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.port = free_port()
        cls.server = subprocess.Popen([OPTIONS.lily, "serve", "-m", "models/lily-tiny", "--port", str(cls.port), "--ctx", "8192"],
                                      cwd=ROOT, stderr=subprocess.DEVNULL)
        options = webdriver.ChromeOptions()
        options.binary_location = "/usr/bin/chromium"
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1000,800"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        cls.browser = webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))

    @classmethod
    def tearDownClass(cls):
        cls.browser.quit()
        cls.server.terminate()
        cls.server.wait(timeout=20)

    def setUp(self):
        deadline = time.time() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                break
            except OSError:
                if time.time() > deadline:
                    raise
                time.sleep(0.1)
        self.browser.get(f"http://127.0.0.1:{self.port}/")
        self.until(lambda: "tokens of context" in self.by("model").text)

    def by(self, name):
        return self.browser.find_element(By.ID, name)

    def until(self, condition, seconds=30):
        WebDriverWait(self.browser, seconds).until(lambda _: condition())

    def setting(self, name, value):
        self.by("open-settings").click()
        field = self.by(name)
        if field.get_attribute("type") == "checkbox":
            if field.is_selected() != value:
                field.click()
        else:
            field.clear()
            field.send_keys(value)
        self.by("close-settings").click()

    def ask(self, text):
        self.by("text").send_keys(text + Keys.ENTER)

    def answers(self):
        return self.browser.find_elements(By.CSS_SELECTOR, ".turn.assistant")

    def done(self):
        return self.by("send").is_displayed() and not self.by("stop").is_displayed()

    def screenshot(self, name):
        if OPTIONS.screenshots:
            os.makedirs(OPTIONS.screenshots, exist_ok=True)
            self.browser.save_screenshot(os.path.join(OPTIONS.screenshots, name + ".png"))

    def test_ask_and_read_the_answer(self):
        self.setting("temperature", "0")
        self.setting("think", False)
        self.ask("What does the word river mean?")
        self.until(lambda: self.answers() and self.done() and "a large natural stream of water" in self.answers()[0].text)
        self.assertIn("tokens at", self.answers()[0].text)
        self.assertIn("context", self.answers()[0].text)
        self.ask("What does the word river mean?")
        self.until(lambda: len(self.answers()) == 2 and self.done())
        self.screenshot("answer")

    def test_thinking_can_be_folded(self):
        self.setting("temperature", "0")
        self.ask("Spell total letter by letter.")
        self.until(lambda: self.answers() and self.done())
        details = self.answers()[0].find_element(By.TAG_NAME, "details")
        self.assertIsNone(details.get_attribute("open"))
        details.find_element(By.TAG_NAME, "summary").click()
        self.assertIn("t o t a l", details.text)
        self.assertIn("t-o-t-a-l", self.answers()[0].find_element(By.CLASS_NAME, "content").text)
        self.screenshot("thinking")

    def test_stop_ends_the_answer(self):
        # An answer that does not end by itself: the tokens that end one are made impossible.
        self.browser.execute_async_script("""
            const done = arguments[0];
            fetch('tokenize', {method: 'POST', body: JSON.stringify({content: '<|im_end|><|endoftext|>'})})
                .then(r => r.json()).then(t => { window.bias = Object.fromEntries(t.tokens.map(id => [id, -100])); done(); });""")
        self.browser.execute_script("request = () => JSON.stringify({messages: [{role: 'user', content: 'x'}], stream: true,"
                                    "stream_options: {include_usage: true}, logit_bias: window.bias, temperature: 2,"
                                    "chat_template_kwargs: {enable_thinking: false}});")
        self.ask("write without end")
        self.until(lambda: self.by("stop").is_displayed() and self.answers() and len(self.answers()[0].text) > 20)
        self.by("text").send_keys(Keys.ESCAPE)
        self.until(self.done)
        text = self.answers()[0].text
        time.sleep(0.5)
        self.assertEqual(text, self.answers()[0].text)

    def test_a_tool_call_is_shown_and_answered(self):
        self.setting("temperature", "0")
        self.setting("tools", WEATHER)
        self.ask("What is the weather in Paris?")
        self.until(lambda: self.answers() and self.done())
        call = self.answers()[0].find_element(By.CLASS_NAME, "call")
        self.assertIn("Calls get_weather", call.text)
        self.assertIn("Paris", call.text)
        self.assertIn("get_weather", self.by("text").get_attribute("placeholder"))
        self.ask('{"temperature": 21}')
        self.until(lambda: len(self.answers()) == 2 and self.done())
        self.assertEqual(len(self.browser.find_elements(By.CSS_SELECTOR, ".turn.tool")), 1)
        self.screenshot("tool-call")

    def test_html_of_the_model_does_not_run(self):
        evil = "<img src=x onerror=\"window.ran=1\"><script>window.ran=1</script> [x](javascript:window.ran=1) **bold** `<b>`"
        self.browser.execute_script("const v = new AnswerView(); v.take({content: arguments[0]}); v.take({reasoning_content: arguments[0]});"
                                    "v.take({tool_calls: [{index: 0, id: 'c', function: {name: arguments[0], arguments: ''}}]}); v.end();", evil)
        time.sleep(0.3)
        turn = self.answers()[0]
        self.assertIsNone(self.browser.execute_script("return window.ran === undefined ? null : window.ran"))
        self.assertEqual(turn.find_elements(By.CSS_SELECTOR, "img, script, a"), [])
        self.assertIn("<img src=x", turn.text)
        self.assertEqual(turn.find_element(By.TAG_NAME, "strong").text, "bold")

    def test_a_code_block_is_one(self):
        self.browser.execute_script("const v = new AnswerView(); v.take({content: arguments[0]}); v.end();",
                                    "Look:\n```py\nprint('<i>')\n```\n1. one\n2. two\n\n[link](https://example.org/a)")
        turn = self.answers()[0]
        self.assertEqual(turn.find_element(By.CSS_SELECTOR, "pre code").text, "print('<i>')")
        self.assertEqual(len(turn.find_elements(By.CSS_SELECTOR, "ol li")), 2)
        self.assertEqual(turn.find_element(By.TAG_NAME, "a").get_attribute("href"), "https://example.org/a")

    def test_nothing_is_complained_about_in_the_console(self):
        errors = [e for e in self.browser.get_log("browser") if e["level"] == "SEVERE" and "favicon" not in e["message"]]
        self.assertEqual(errors, [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lily", default=str(ROOT / "build/release/lily"))
    parser.add_argument("--screenshots", default="")
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
