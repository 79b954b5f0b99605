#include "engine/grammar/token_matcher.h"

#include <gtest/gtest.h>

#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "engine/grammar/grammar_compiler.h"
#include "engine/grammar/schema_compiler.h"
#include "tests/support/golden.h"
#include "tests/text/tiny_tokenizer.h"

namespace lily::engine::grammar {
namespace {

using text::tiny;

const TokenTrie& tiny_trie() {
  static const TokenTrie kTrie(tiny());
  return kTrie;
}

std::vector<ordered_json> common_schemas() {
  std::ifstream in("tests/golden/json_schema/documents.jsonl");
  std::vector<ordered_json> all;
  for (std::string line; std::getline(in, line);) all.push_back(ordered_json::parse(line));
  return all;
}

bool has(const std::vector<uint64_t>& words, int32_t id) {
  return (words[static_cast<size_t>(id) / 64] >> (id % 64) & 1) != 0;
}

TEST(TokenTrie, HoldsEveryPlainTokenOnce) {
  const TokenTrie& trie = tiny_trie();
  EXPECT_TRUE(trie.has_all_bytes());
  std::vector<int> n(static_cast<size_t>(tiny().n_tokens()));
  std::string path;
  for (size_t i = 0; i < trie.nodes().size(); ++i) {
    const TokenTrie::Node& node = trie.nodes()[i];
    ASSERT_GT(node.end, i);
    path.resize(node.depth - size_t{1});
    path += static_cast<char>(node.byte);
    for (const int32_t id : trie.tokens_of(node)) {
      EXPECT_EQ(tiny().token_bytes(id), path);
      ++n[static_cast<size_t>(id)];
    }
  }
  for (int32_t id = 0; id < tiny().n_tokens(); ++id) {
    const bool plain = !tiny().is_added(id) && !tiny().token_bytes(id).empty();
    ASSERT_EQ(n[static_cast<size_t>(id)], plain ? 1 : 0) << id;
  }
}

// The mask against all tokens one by one, each read from the beginning by a matcher of its own.
TEST(TokenMatcher, MasksEqualBruteForce) {
  std::mt19937 random(5);
  int n_states = 0;
  for (const ordered_json& row : common_schemas()) {
    Grammar grammar = schema_grammar(row["schema"], "schema");
    const Grammar copy = grammar;
    TokenMatcher matcher(std::move(grammar), tiny_trie(), tiny());
    TokenMatcher::Cursor cursor(matcher);
    Matcher oracle(copy);
    std::string text;
    for (int step = 0; step < 12; ++step) {
      std::vector<uint64_t> words((static_cast<size_t>(tiny().n_tokens()) + 63) / 64);
      cursor.allow(words);
      const Matcher::State here = oracle.next(oracle.start(), text);
      std::vector<int32_t> possible;
      for (int32_t id = 0; id < tiny().n_tokens(); ++id) {
        const bool plain = !tiny().is_added(id) && !tiny().token_bytes(id).empty();
        const bool fits = plain && oracle.next(here, tiny().token_bytes(id)) != Matcher::kDead;
        ASSERT_EQ(has(words, id), fits) << id << " after " << text;
        ASSERT_EQ(cursor.allows(id), fits) << id << " after " << text;
        if (fits) possible.push_back(id);
      }
      ASSERT_EQ(cursor.complete(), oracle.complete(here));
      ++n_states;
      if (possible.empty()) break;
      const int32_t next = possible[random() % possible.size()];
      ASSERT_TRUE(cursor.accept(next));
      text += tiny().token_bytes(next);
    }
  }
  EXPECT_GT(n_states, 100);
}

// However a valid document is cut into tokens, each is allowed; and a wrong one is not.
TEST(TokenMatcher, AnyTokenisationOfAValidDocumentPasses) {
  std::mt19937 random(6);
  for (const ordered_json& row : common_schemas()) {
    TokenMatcher matcher(schema_grammar(row["schema"], "schema"), tiny_trie(), tiny());
    const auto passes = [&](const std::vector<int32_t>& ids) {
      TokenMatcher::Cursor cursor(matcher);
      for (const int32_t id : ids)
        if (!cursor.allows(id) || !cursor.accept(id)) return false;
      return cursor.complete();
    };
    const auto random_tokens = [&](const std::string& text) {
      std::vector<int32_t> ids;
      for (size_t at = 0; at < text.size();) {
        std::vector<int32_t> fitting;
        for (int32_t id = 0; id < tiny().n_tokens(); ++id) {
          const std::string_view bytes = tiny().token_bytes(id);
          if (!bytes.empty() && !tiny().is_added(id) && std::string_view(text).substr(at).starts_with(bytes))
            fitting.push_back(id);
        }
        ids.push_back(fitting.at(random() % fitting.size()));
        at += tiny().token_bytes(ids.back()).size();
      }
      return ids;
    };
    for (size_t i = 0; i < row["valid"].size(); i += 6) {
      const std::string text = row["valid"][i].dump();
      EXPECT_TRUE(passes(tiny().encode(text, text::AddedTokens::none))) << text;
      EXPECT_TRUE(passes(random_tokens(text))) << text;
    }
    for (size_t i = 0; i < row["invalid"].size(); i += 6) {
      const std::string text = row["invalid"][i].dump();
      EXPECT_FALSE(passes(tiny().encode(text, text::AddedTokens::none))) << text;
      EXPECT_FALSE(passes(random_tokens(text))) << text;
    }
  }
}

TEST(TokenMatcher, MasksAreKeptAndMemoryIsBounded) {
  TokenMatcher matcher(json_object_grammar(), tiny_trie(), tiny(),
                       {.max_state_bytes = size_t{1} << 20, .max_mask_bytes = 4096});
  TokenMatcher::Cursor a(matcher), b(matcher);
  std::vector<uint64_t> words((static_cast<size_t>(tiny().n_tokens()) + 63) / 64);
  a.allow(words);
  a.allow(words);
  b.allow(words);
  EXPECT_EQ(matcher.n_masks_made(), 1);
  ASSERT_TRUE(a.read("{\"first\": [1, {\"x\": \""));
  std::mt19937 random(1);
  for (int i = 0; i < 400; ++i) {  // each text leads through other states
    ASSERT_TRUE(b.read(i == 0 ? "{\"k\": [[" : i % 2 == 1 ? "[{\"" : "a\": [1, "));
    std::vector<uint64_t> mask(words.size());
    b.allow(mask);
    EXPECT_LT(matcher.n_bytes(), size_t{4} << 20);
  }
  // The other text has stood through all forgetting.
  EXPECT_TRUE(a.allows(tiny().encode("\"", text::AddedTokens::none).at(0)));
  EXPECT_TRUE(a.read("y\"}]}"));
  EXPECT_TRUE(a.finished());
}

TEST(GrammarCompiler, SharesGrammarsAndForgetsTheOldest) {
  GrammarCompiler compiler(tiny(), {8130, 8128}, {.max_grammars = 2});
  ChatRequest request;
  request.format.kind = OutputFormat::Kind::json_schema;
  for (const char* schema :
       {R"({"type":"integer"})", R"({"type":"integer"})", R"({"type":"null"})", R"({"type":"boolean"})"}) {
    request.format.schema = ordered_json::parse(schema);
    EXPECT_NE(compiler.constraint_for(request, {.n_room = 100}), nullptr);
  }
  EXPECT_EQ(compiler.n_grammars(), 2);
}

}  // namespace
}  // namespace lily::engine::grammar
