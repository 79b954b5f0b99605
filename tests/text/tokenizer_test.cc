#include "text/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <thread>

#include "base/error.h"
#include "tests/text/golden_lines.h"
#include "tests/text/tiny_tokenizer.h"
#include "text/unicode.h"

namespace lily::text {
namespace {

using testing::ElementsAre;

int32_t id(std::string_view added) { return tiny().id_of(added).value(); }

// Ids of single bytes, for texts cut in the middle of characters.
std::vector<int32_t> byte_ids(std::string_view bytes) {
  static const auto by_byte = [] {
    std::array<int32_t, 256> ids{};
    for (int32_t i = 0; i < tiny().n_tokens(); ++i)
      if (tiny().token_bytes(i).size() == 1) ids[static_cast<uint8_t>(tiny().token_bytes(i)[0])] = i;
    return ids;
  }();
  std::vector<int32_t> ids;
  for (const char c : bytes) ids.push_back(by_byte[static_cast<uint8_t>(c)]);
  return ids;
}

std::string without_special(std::string text) {
  for (int32_t i = 0; i < tiny().n_tokens(); ++i) {
    if (!tiny().is_special(i)) continue;
    const std::string spelling(tiny().token_bytes(i));
    for (size_t at; (at = text.find(spelling)) != std::string::npos;) text.erase(at, spelling.size());
  }
  return text;
}

TEST(Tokenizer, EqualsTheOriginalOnTheModelsGoldens) {
  const auto golden = read_golden("tests/golden/lily-tiny/tokenizer.jsonl");
  EXPECT_EQ(golden.rows.size(), 304u);
  EXPECT_LE(golden.n_damaged, 2);
  for (const auto& row : golden.rows) {
    const auto text = row["text"].get<std::string>();
    const auto ids = row["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tiny().encode(text, AddedTokens::all), ids) << text;
    EXPECT_EQ(tiny().decode(ids), without_special(row["decoded"].get<std::string>())) << text;
    EXPECT_EQ(tiny().decode_bytes(ids), row["decoded"].get<std::string>()) << text;
  }
  EXPECT_THAT(tiny().encode("\u2028", AddedTokens::all), ElementsAre(158, 222, 101));
}

TEST(Tokenizer, EqualsTheOriginalOnGeneratedTexts) {
  const auto golden = read_golden("tests/golden/text/tokens.jsonl");
  ASSERT_EQ(golden.rows.size(), 600u);
  for (const auto& row : golden.rows) {
    const auto text = row["text"].get<std::string>();
    const auto ids = row["ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tiny().encode(text, AddedTokens::all), ids) << row["text"];
    EXPECT_EQ(tiny().decode(ids), row["decoded"].get<std::string>()) << row["text"];
  }
}

TEST(Tokenizer, PromptsAndAnswersOfTheGoldens) {
  const auto golden = read_golden("tests/golden/lily-tiny/prompts.jsonl");
  ASSERT_EQ(golden.rows.size(), 29u);
  for (const auto& row : golden.rows) {
    EXPECT_EQ(tiny().encode(row["prompt"].get<std::string>(), AddedTokens::all),
              row["prompt_ids"].get<std::vector<int32_t>>());
    const auto output = row["output_ids"].get<std::vector<int32_t>>();
    EXPECT_EQ(tiny().decode_bytes(output), row["output_text"].get<std::string>());
    EXPECT_EQ(tiny().decode(output), without_special(row["output_text"].get<std::string>()));
  }
}

TEST(Tokenizer, KnowsItsTokens) {
  EXPECT_EQ(tiny().n_tokens(), 8161);
  EXPECT_EQ(id("<|im_end|>"), 8130);
  EXPECT_EQ(id("<think>"), 8152);
  EXPECT_FALSE(tiny().id_of("<function="));
  EXPECT_TRUE(tiny().is_special(id("<|im_end|>")));
  EXPECT_FALSE(tiny().is_special(id("<think>")));
  EXPECT_TRUE(tiny().is_added(id("<think>")));
  EXPECT_FALSE(tiny().is_added(64));
  EXPECT_EQ(tiny().token_bytes(64), "a");
  EXPECT_EQ(tiny().token_bytes(id("</tool_call>")), "</tool_call>");
  for (const int32_t outside : {-1, 8161, 8191, 1 << 30}) {
    EXPECT_EQ(tiny().token_bytes(outside), "");
    EXPECT_FALSE(tiny().is_added(outside));
  }
}

TEST(Tokenizer, ControlSpellingsOfUntrustedTextStayText) {
  const std::string text = "please repeat <|im_end|> and <think> literally, or <tool_call></tool_response>";
  const auto is_added = [](int32_t i) { return tiny().is_added(i); };
  const auto untrusted = tiny().encode(text, AddedTokens::none);
  EXPECT_TRUE(std::none_of(untrusted.begin(), untrusted.end(), is_added));
  EXPECT_EQ(tiny().decode(untrusted), text);

  const auto assistant = tiny().encode(text, AddedTokens::assistant);
  EXPECT_EQ(std::count_if(assistant.begin(), assistant.end(), is_added), 2);
  EXPECT_EQ(std::count(assistant.begin(), assistant.end(), id("<think>")), 1);
  EXPECT_EQ(std::count(assistant.begin(), assistant.end(), id("<tool_call>")), 1);
  EXPECT_EQ(tiny().decode(assistant), text);
}

TEST(Tokenizer, AddedTokensAreCutOutBeforeTheSplit) {
  for (const char* before : {"Hi.", ")", "!!", "x ", "\n\n", "'", "<"}) {
    const auto ids = tiny().encode(std::string(before) + "<|im_end|>\n<|im_start|>user", AddedTokens::all);
    EXPECT_EQ(std::count(ids.begin(), ids.end(), id("<|im_end|>")), 1) << before;
    EXPECT_EQ(std::count(ids.begin(), ids.end(), id("<|im_start|>")), 1) << before;
    EXPECT_EQ(tiny().decode(ids), std::string(before) + "\nuser");
  }
}

TEST(Tokenizer, RangesDoNotDisturbOrdinaryText) {
  // Pieces and compositions that reach across every boundary.
  const std::string text = "Hello  world e\u0301a\u0323\u0307 <|im_end|>\n\n  we'll !!\n\n1234";
  const auto whole = tiny().encode(text, AddedTokens::all);
  const size_t control = text.find("<|im_end|>"), after = control + 10;
  for (size_t a = 0; a <= control; ++a)
    for (size_t b = after; b <= text.size(); ++b) {
      const TextRange ranges[] = {
          {a, AddedTokens::none}, {b, AddedTokens::all}, {text.size(), AddedTokens::assistant}};
      std::vector<int32_t> ids;
      tiny().encode_append(text, ranges, ids);
      ASSERT_EQ(ids, whole) << a << " " << b;
    }
}

TEST(Tokenizer, AnAddedTokenIsNotFoundAcrossRangesOfDifferentKind) {
  const std::string text = "<think>";
  const TextRange mixed[] = {{3, AddedTokens::none}, {7, AddedTokens::all}};
  const TextRange same[] = {{3, AddedTokens::all}, {5, AddedTokens::all}, {7, AddedTokens::all}};
  std::vector<int32_t> ids;
  tiny().encode_append(text, mixed, ids);
  EXPECT_EQ(std::count(ids.begin(), ids.end(), id("<think>")), 0);
  ids.clear();
  tiny().encode_append(text, same, ids);
  EXPECT_THAT(ids, ElementsAre(id("<think>")));
}

TEST(Tokenizer, AppendsAfterWhatIsThere) {
  std::vector<int32_t> ids = {1, 2, 3};
  tiny().encode_append("the cat and the cat", AddedTokens::none, ids);
  const auto alone = tiny().encode("the cat and the cat", AddedTokens::none);
  EXPECT_EQ(std::vector<int32_t>(ids.begin() + 3, ids.end()), alone);
}

TEST(Tokenizer, AnyBytesSurvive) {
  std::mt19937 random(17);
  for (int round = 0; round < 300; ++round) {
    std::string bytes(random() % 60, '\0');
    for (char& c : bytes) c = static_cast<char>(random() % 3 ? random() % 128 : random());
    const auto ids = tiny().encode(bytes, AddedTokens::none);
    EXPECT_EQ(tiny().decode_bytes(ids), to_nfc(bytes)) << "seed 17, round " << round;
    EXPECT_EQ(tiny().decode(ids), replace_invalid_utf8(to_nfc(bytes)));
  }
}

// The rule itself, word by word: merge the leftmost pair of lowest rank until none is left.
std::vector<int32_t> merged_naively(const TokenizerData& data, std::string_view word) {
  std::map<std::pair<int32_t, int32_t>, std::pair<size_t, int32_t>> rank;
  for (size_t i = 0; i < data.merges.size(); ++i)
    rank.emplace(std::pair{data.merges[i].left, data.merges[i].right}, std::pair{i, data.merges[i].result});
  std::vector<int32_t> ids;
  for (const char c : word) ids.push_back(data.byte_tokens[static_cast<uint8_t>(c)]);
  for (;;) {
    size_t best = SIZE_MAX, at = 0;
    int32_t result = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      if (const auto found = rank.find({ids[i], ids[i + 1]});
          found != rank.end() && found->second.first < best)
        best = found->second.first, result = found->second.second, at = i;
    if (best == SIZE_MAX) return ids;
    ids[at] = result;
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(at) + 1);
  }
}

TEST(Bpe, MergesLowestRankFirstAndLeftmostOnTies) {
  TokenizerData data;
  for (int byte = 0; byte < 256; ++byte) data.byte_tokens[byte] = byte;
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    data.merges.clear();  // over a three-letter alphabet many pairs overlap
    std::vector<int32_t> tokens = {'a', 'b', 'c'};
    for (int32_t i = 0; i < 30; ++i) {
      data.merges.push_back({tokens[random() % tokens.size()], tokens[random() % tokens.size()], 256 + i});
      tokens.push_back(256 + i);
    }
    const Bpe bpe(data.byte_tokens, data.merges);
    Bpe::Workspace workspace;
    std::string word;
    for (size_t n = random() % 200; n > 0; --n) word.push_back("abc"[random() % 3]);
    std::vector<int32_t> ids;
    bpe.encode_append(word, workspace, ids);
    EXPECT_EQ(ids, merged_naively(data, word)) << "seed 3, round " << round;
  }
}

TEST(Tokenizer, AMegabyteOfAnythingTakesNoQuadraticTime) {
  const size_t n = 1 << 20;
  std::mt19937 random(5);
  std::string word(n, ' '), marks = "a";
  for (char& c : word) c = static_cast<char>('a' + random() % 26);
  while (marks.size() < n) marks += random() % 2 ? "\u0323" : "\u0307";
  const std::string tags = [&] {
    std::string text;
    while (text.size() < n) text += "<|im_<tool_<";
    return text;
  }();
  for (const std::string& text :
       {word, std::string(n, 'a'), std::string(n, ' '), std::string(n, '7'), std::string(n, '\n'),
        std::string(n, '!'), std::string(n, '<'), std::string(n, '\xff'), marks, tags}) {
    const auto begin = std::chrono::steady_clock::now();
    const auto ids = tiny().encode(text, AddedTokens::all);
    // A quadratic step would take minutes; slow machines and sanitizers get their share.
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20)) << text.substr(0, 8);
    EXPECT_EQ(tiny().decode_bytes(ids), to_nfc(text)) << text.substr(0, 8);
  }
}

TEST(Tokenizer, ThreadsShareOne) {
  const auto golden = read_golden("tests/golden/lily-tiny/prompts.jsonl");
  std::vector<std::thread> threads;
  std::vector<int> n_wrong(4, 0);
  for (size_t t = 0; t < n_wrong.size(); ++t)
    threads.emplace_back([&, t] {
      for (const auto& row : golden.rows)
        n_wrong[t] += tiny().encode(row["prompt"].get<std::string>(), AddedTokens::all) !=
                      row["prompt_ids"].get<std::vector<int32_t>>();
    });
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(n_wrong, testing::Each(0));
}

TEST(Detokenizer, ACharacterOverTwoTokensAppearsWhenComplete) {
  StreamingDetokenizer detokenizer(tiny());
  const auto ids = byte_ids("\xF0\x9F\x98\x80");
  for (const int i : {0, 1, 2}) EXPECT_EQ(detokenizer.push(ids[i]), "");
  EXPECT_EQ(detokenizer.push(ids[3]), "😀");
  EXPECT_EQ(detokenizer.finish(), "");
}

TEST(Detokenizer, InvalidParts) {
  const auto with = [](std::vector<int32_t> a, std::vector<int32_t> b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  };
  const auto head = byte_ids("\xF0\x9F"), tail = byte_ids("\x98\x80");
  EXPECT_EQ(tiny().decode(with(head, tail)), "😀");
  EXPECT_EQ(tiny().decode(with(with(head, {id("<|im_start|>")}), tail)), "😀");
  EXPECT_EQ(tiny().decode(with(with(head, {8191}), tail)), "😀");  // a row of padding
  EXPECT_EQ(tiny().decode(with(with(head, {id("<think>")}), tail)), "\uFFFD<think>\uFFFD\uFFFD");
  EXPECT_EQ(tiny().decode(byte_ids("\xF0(\xE4\xB8")), "\uFFFD(\uFFFD");
  EXPECT_EQ(tiny().decode(head), "\uFFFD");
  EXPECT_EQ(tiny().decode(byte_ids("\xFF")), "\uFFFD");
  EXPECT_EQ(tiny().decode({}), "");
}

// Tokens for any cut of a text: a made-up vocabulary in which every substring of it is a token.
TEST(Detokenizer, AllTwoCutSplitsJoinToTheText) {
  const std::string text = "שלום 你好 🙂 z";
  for (size_t a = 0; a <= text.size(); ++a)
    for (size_t b = a; b <= text.size(); ++b) {
      TokenizerData data;
      data.token_bytes = {text.substr(0, a), text.substr(a, b - a), text.substr(b)};
      const Tokenizer tokenizer(data);
      StreamingDetokenizer detokenizer(tokenizer);
      std::string joined;
      for (const int32_t i : {0, 1, 2}) {
        const std::string piece = detokenizer.push(i);
        EXPECT_EQ(replace_invalid_utf8(piece), piece);
        joined += piece;
      }
      EXPECT_EQ(detokenizer.finish(), "");
      EXPECT_EQ(joined, text) << a << " " << b;

      StreamingDetokenizer cut(tokenizer);  // the last part never comes
      std::string shown = cut.push(0);
      shown += cut.push(1);
      shown += cut.finish();
      EXPECT_EQ(shown, replace_invalid_utf8(text.substr(0, b)));
    }
}

TEST(Detokenizer, PiecesJoinToTheBatchDecode) {
  std::mt19937 random(11);
  for (int round = 0; round < 300; ++round) {
    std::vector<int32_t> ids(random() % 40);
    for (int32_t& i : ids)
      i = static_cast<int32_t>(random() % 4 == 0 ? 8100 + random() % 100
                               : random() % 2    ? random() % 256
                                                 : random() % 8161);
    std::string bytes, expected;  // the rule: special ids vanish, added tokens end what is open
    const auto end_run = [&] { expected += replace_invalid_utf8(bytes), bytes.clear(); };
    for (const int32_t i : ids) {
      if (tiny().is_special(i)) continue;
      if (tiny().is_added(i)) end_run(), expected += tiny().token_bytes(i);
      else bytes += tiny().token_bytes(i);
    }
    end_run();
    StreamingDetokenizer detokenizer(tiny());
    std::string joined;
    for (const int32_t i : ids) joined += detokenizer.push(i);
    joined += detokenizer.finish();
    EXPECT_EQ(joined, expected) << "seed 11, round " << round;
    EXPECT_EQ(tiny().decode(ids), expected);
  }
}

}  // namespace
}  // namespace lily::text
