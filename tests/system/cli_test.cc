// The program as a person or a script meets it: output, JSON documents, exit codes, one clear line for each
// error.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/support/temp_folder.h"
#include "tests/system/program.h"
#include "tests/system/terminal.h"

namespace lily::test {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

const std::string kTiny = "-m models/lily-tiny ";
// A golden prompt and its answer, with wide margins at every step.
const std::string kQuestion = "--no-think -t 0 'What does the word river mean?'";
const char* const kAnswer = "river (noun): a large natural stream of water (larger than a creek)";

void expect_one_clear_line(const Outcome& run, int exit_code, const std::string& mentions) {
  EXPECT_EQ(run.exit_code, exit_code) << run.err;
  EXPECT_EQ(std::count(run.err.begin(), run.err.end(), '\n'), 1) << run.err;
  EXPECT_EQ(run.err.rfind("lily: ", 0), 0u) << run.err;
  EXPECT_NE(run.err.find(mentions), std::string::npos) << run.err;
}

void expect_keys(const Json& json, std::initializer_list<const char*> keys) {
  for (const char* key : keys) EXPECT_TRUE(json.contains(key)) << key << " in " << json.dump();
}

TEST(Run, AnswersAPromptGivenAsWords) {
  const Outcome run = lily("run " + kTiny + kQuestion);
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_EQ(run.out, std::string(kAnswer) + "\n");
  EXPECT_NE(run.err.find("tok/s"), std::string::npos) << run.err;
}

TEST(Run, AnswersAPromptFromStdinAsJson) {
  const fs::path prompt = fs::temp_directory_path() / "lily_prompt_test.txt";
  std::ofstream(prompt) << "What does the word river mean?";
  const Outcome run = lily("run " + kTiny + "--no-think -t 0 --json", "", prompt.string());
  fs::remove(prompt);
  const Json json = Json::parse(run.out);
  expect_keys(json, {"text", "reasoning", "tool_calls", "token_ids", "finish_reason", "prompt_tokens",
                     "cached_tokens", "completion_tokens", "prefill_tok_s", "decode_tok_s", "ttft_ms",
                     "model", "backend", "seed"});
  EXPECT_EQ(json["text"], kAnswer);
  EXPECT_EQ(json["finish_reason"], "stop");
  EXPECT_EQ(json["reasoning"], "");
}

TEST(Run, ThinkingIsToldFromTheAnswer) {
  const Json json = Json::parse(lily("run " + kTiny + "-t 0 --json Spell total letter by letter.").out);
  EXPECT_EQ(json["reasoning"], "The letters of total: t o t a l.\n");
  EXPECT_EQ(json["text"], "t-o-t-a-l");
}

TEST(Run, ThinkingStaysOutOfAPipe) {
  const Outcome run = lily("run " + kTiny + "-t 0 Spell total letter by letter.");
  EXPECT_EQ(run.out, "t-o-t-a-l\n") << run.err;
}

TEST(Run, WordsStandBeforeTheTextOfAPipe) {
  const TempFolder folder;
  const fs::path piped = folder.path() / "piped", joined = folder.path() / "joined";
  write_file(piped, "river mean?");
  write_file(joined, "What does the word\n\nriver mean?");
  const std::string options = "run " + kTiny + "--no-think -t 0 --json ";
  const Json both = Json::parse(lily(options + "What does the word", "", piped.string()).out),
             whole = Json::parse(lily(options, "", joined.string()).out),
             words = Json::parse(lily(options + "What does the word").out);
  EXPECT_EQ(both["prompt_tokens"], whole["prompt_tokens"]);
  EXPECT_EQ(both["token_ids"], whole["token_ids"]);
  EXPECT_LT(words["prompt_tokens"], whole["prompt_tokens"]);
}

TEST(Run, AStopStringEndsTheAnswerBeforeIt) {
  const Json json = Json::parse(lily("run " + kTiny + "--json --stop natural " + kQuestion).out);
  EXPECT_EQ(json["text"], "river (noun): a large ");
  EXPECT_EQ(json["finish_reason"], "stop");
}

TEST(Run, AStopStringTakesOneWord) {
  const Json json = Json::parse(
      lily("run " + kTiny + "--json --no-think -t 0 --stop xyzzy What does the word river mean?").out);
  EXPECT_EQ(json["text"], kAnswer);
}

TEST(Run, WordsAfterTheMarkAreThePrompts) {
  const std::string options = "run " + kTiny + "--json --no-think -t 0 ";
  EXPECT_EQ(Json::parse(lily(options + "--stop xyzzy -- What does the word river mean?").out)["text"],
            kAnswer);
  const Json apart = Json::parse(lily(options + "-n 4 hello -- -x").out),
             whole = Json::parse(lily(options + "-n 4 'hello -x'").out);
  EXPECT_EQ(apart["prompt_tokens"], whole["prompt_tokens"]);
  EXPECT_EQ(apart["token_ids"], whole["token_ids"]);
  EXPECT_EQ(lily("run --help").out.find("--stop TEXT ..."), std::string::npos);
}

TEST(Run, AnAnswerThatIsOnlyThoughtIsExplained) {
  const std::string command = "run " + kTiny + "-t 0 -n 3 ", question = "Spell total letter by letter.";
  const Outcome run = lily(command + question);
  EXPECT_EQ(run.exit_code, 0);
  EXPECT_EQ(run.out, "");
  EXPECT_NE(run.err.find("the model only thought (3 tokens, ended by the token limit); --no-think"),
            std::string::npos)
      << run.err;
  EXPECT_EQ(lily(command + "--json " + question).err.find("only thought"), std::string::npos);
  EXPECT_EQ(lily("run " + kTiny + "-t 0 " + question).err.find("only thought"), std::string::npos);
}

TEST(Run, AReaderThatIsGoneEndsItQuietly) {
  constexpr int kPlace = 9;  // what a shell can name
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(dup2(ends[1], kPlace), kPlace);
  close(ends[0]);
  close(ends[1]);
  for (const std::string command : {"inspect --json models/lily-tiny", "plan --list", "version"}) {
    const Outcome run = lily(command + " >&9; exit $?; true");
    EXPECT_EQ(run.exit_code, 141) << command;
    EXPECT_EQ(run.err, "") << command;
  }
  EXPECT_EQ(lily("run " + kTiny + kQuestion + " >&9; exit $?; true").exit_code, 141);
  close(kPlace);
}

TEST(Run, AnOutputThatCannotBeWrittenIsAFailure) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "this system has no /dev/full";
  for (const std::string command : {"version", "plan --list"})
    EXPECT_EQ(lily(command + " >/dev/full; exit $?; true").exit_code, 1) << command;
}

TEST(Run, TheTokenLimitIsTheFinishReason) {
  const Json json = Json::parse(lily("run " + kTiny + "-n 2 --json " + kQuestion).out);
  EXPECT_EQ(json["finish_reason"], "length");
  EXPECT_EQ(json["completion_tokens"], 2);
}

TEST(Run, OneSeedGivesOneAnswer) {
  const std::string command = "run " + kTiny + "--no-think -t 1.5 --seed 7 --json -n 40 Tell me a story.";
  const Json a = Json::parse(lily(command).out), b = Json::parse(lily(command).out);
  EXPECT_EQ(a["token_ids"], b["token_ids"]);
  const Json other =
      Json::parse(lily("run " + kTiny + "--no-think -t 1.5 --seed 8 --json -n 40 Tell me a story.").out);
  EXPECT_NE(a["token_ids"], other["token_ids"]);
}

TEST(Run, AProfileShowsEveryStepAndOp) {
  const TempFolder folder;
  const fs::path path = folder.path() / "trace.json";
  const Outcome run =
      lily("run " + kTiny + "--backend cpu -n 5 --profile " + path.string() + " " + kQuestion);
  ASSERT_EQ(run.exit_code, 0) << run.err;
  int n_decode = 0, n_attention = 0;
  double steps_us = 0, ops_us = 0;
  for (const Json& event : Json::parse(read_file(path))) {
    if (event["ph"] != "X") continue;
    const std::string name = event["name"];
    EXPECT_GE(event["dur"].get<double>(), 0) << event;
    n_decode += name == "decode";
    n_attention += name.find("attention") != std::string::npos;
    const bool is_step = event["args"].contains("rows");
    (is_step ? steps_us : ops_us) += event["dur"].get<double>();
  }
  EXPECT_GE(n_decode, 4);
  EXPECT_GE(n_attention, 4);
  EXPECT_GT(ops_us, 0.3 * steps_us);  // ops are most of a step, and lie inside of steps
  EXPECT_LE(ops_us, steps_us);
  EXPECT_EQ(read_file(path).find("river"), std::string::npos);
  expect_one_clear_line(lily("run " + kTiny + "--profile /nowhere/t.json " + kQuestion), 2,
                        "/nowhere/t.json");
}

TEST(Run, ToolsCanBeCalled) {
  std::ifstream goldens("tests/golden/lily-tiny/prompts.jsonl");
  Json golden;
  for (std::string line; std::getline(goldens, line);)
    if (Json json = Json::parse(line); json["messages"][0]["content"] == "What is the weather in Zurich?")
      golden = std::move(json);
  const fs::path tools = fs::temp_directory_path() / "lily_tools_test.json";
  std::ofstream(tools) << golden["tools"].dump();
  const Json json = Json::parse(
      lily("run " + kTiny + "-t 0 --json --tools " + tools.string() + " 'What is the weather in Zurich?'")
          .out);
  fs::remove(tools);
  ASSERT_EQ(json["tool_calls"].size(), 1u) << json.dump();
  EXPECT_EQ(json["tool_calls"][0]["name"], "get_weather");
  EXPECT_EQ(Json::parse(json["tool_calls"][0]["arguments"].get<std::string>())["city"], "Zurich");
  EXPECT_EQ(json["finish_reason"], "tool_calls");
}

TEST(Run, WithoutAModelTheDemoAnswersAndSaysSo) {
  const Outcome run = lily("run " + kQuestion);
  EXPECT_EQ(run.out, std::string(kAnswer) + "\n");
  EXPECT_NE(run.err.find("demo model"), std::string::npos) << run.err;
}

TEST(Run, TheDemoModelHasAName) {
  const Outcome run = lily("run -m lily-tiny " + kQuestion);
  EXPECT_EQ(run.out, std::string(kAnswer) + "\n") << run.err;
  EXPECT_EQ(run.err.find("demo model"), std::string::npos) << run.err;
}

TEST(Run, TheExampleOfItsHelpIsAnsweredWell) {
  const std::string help = lily("run --help").out;
  const size_t at = help.find("lily run ", help.find("Examples:")) + 5;
  const Outcome run = lily(help.substr(at, help.find('\n', at) - at));
  EXPECT_EQ(run.out, std::string(kAnswer) + "\n") << run.err;
}

TEST(Help, IsACommandToo) {
  EXPECT_EQ(lily("help").out, lily("--help").out);
  EXPECT_EQ(lily("help run").out, lily("run --help").out);
  EXPECT_NE(lily("help run").out.find("--no-think"), std::string::npos);
  expect_one_clear_line(lily("help fly"), 2, "'fly' is not a command");
}

TEST(Usage, ANearMissIsNamedWithTheCommandsHelp) {
  expect_one_clear_line(lily("run --no-thnk x"), 2,
                        "lily run has no option --no-thnk: did you mean --no-think? see lily run --help");
  expect_one_clear_line(lily("run --temp=1 x"), 2, "no option --temp: did you mean --temperature?");
  expect_one_clear_line(lily("diff --profile t.json"), 2,
                        "lily diff has no option --profile; see lily diff --help");
  expect_one_clear_line(lily("run --temperature hot x"), 2, "see lily run --help");
  expect_one_clear_line(lily("run -x y"), 2, "lily run has no option -x; see lily run --help");
  expect_one_clear_line(lily("--model lily-tiny run x"), 2,
                        "option --model stands before the command; write it behind: lily run --model ...");
  expect_one_clear_line(lily("--verion"), 2,
                        "lily has no option --verion: did you mean --version? see lily --help");
  expect_one_clear_line(lily("-m lily-tiny x"), 2, "lily has no option -m; see lily --help");
  expect_one_clear_line(lily("serv"), 2, "'serv' is not a command: did you mean serve? see lily --help");
}

TEST(Usage, ANoticeDoesNotStandBeforeAnError) {
  expect_one_clear_line(lily("run --backend abacus x"), 2, "abacus");
  expect_one_clear_line(lily("run --disable P9 x"), 2, "P9");
  expect_one_clear_line(lily("serve --backend abacus"), 2, "abacus");
}

TEST(Usage, MistakesExitWith2AndOneLine) {
  expect_one_clear_line(lily("fly"), 2, "fly");
  expect_one_clear_line(lily("run --temperature hot x"), 2, "temperature");
  expect_one_clear_line(lily("run " + kTiny + "--backend abacus x"), 2, "abacus");
  expect_one_clear_line(lily("run " + kTiny), 2, "no prompt");
  expect_one_clear_line(lily("run -m /nonexistent x"), 2, "'/nonexistent' does not exist");
  expect_one_clear_line(lily("run -m src x"), 2, "no config.json");
  expect_one_clear_line(lily("run -m no/such-model x"), 2, "no/such-model");
  expect_one_clear_line(lily("run -m 'two\nlines' x"), 2, "two\\x0alines");
  expect_one_clear_line(lily("run -m 'two/li\nnes' x"), 2, "two/li\\x0anes");
  expect_one_clear_line(lily("plan --shape qwen3.6-35b-a3b --disable P9"), 2, "P9");
  expect_one_clear_line(lily("plan --shape qwen3.6-35b-a3b --device m9"), 2, "m9");
  expect_one_clear_line(lily("plan --shape qwen3.6-35b-a3b --backend reference --activations int8"), 2,
                        "--activations");
  expect_one_clear_line(lily("run " + kTiny + "--activations int4 x"), 2, "int4");
  expect_one_clear_line(lily("eval " + kTiny), 2, "--goldens");
  expect_one_clear_line(lily("run " + kTiny + "--seed -1 x"), 2, "seed");
}

TEST(Usage, EveryCommandHasHelpWithExamples) {
  for (const char* command : {"run", "inspect", "plan", "eval", "diff", "selftest", "synth", "bench"}) {
    const Outcome run = lily(std::string(command) + " --help");
    EXPECT_EQ(run.exit_code, 0);
    EXPECT_NE(run.out.find("Examples:"), std::string::npos) << command;
  }
}

TEST(Model, ABrokenCheckpointExitsWith1AndOneLine) {
  const fs::path folder = fs::temp_directory_path() / "lily_broken_model";
  fs::remove_all(folder);
  fs::copy("models/lily-tiny", folder);
  fs::resize_file(folder / "model.safetensors", fs::file_size(folder / "model.safetensors") - 1000);
  expect_one_clear_line(lily("run -m " + folder.string() + " x"), 1, "model.safetensors");
  EXPECT_EQ(lily("inspect " + folder.string()).exit_code, 1);
  fs::remove_all(folder);
}

TEST(Model, WhatOtherEnginesReadIsNamedWithTheWayOut) {
  const TempFolder folder;
  const std::string at = folder.path().string();
  write_file(folder.path() / "model.gguf", "GGUF\3");
  write_file(folder.path() / "sha256-of-a-blob", "GGUF\3");
  fs::create_directory(folder.path() / "torch");
  write_file(folder.path() / "torch/pytorch_model.bin", "PK");
  write_file(folder.path() / "notes.txt", "text");
  for (const std::string command : {"run -m ", "inspect "}) {
    const std::string end = command == "inspect " ? "" : " x";
    const auto refuses = [&](const std::string& path, const std::string& mentions) {
      expect_one_clear_line(lily(command + path + end), 2, mentions);
    };
    refuses(at + "/model.gguf", "model.gguf' is a GGUF file, a format that lily does not read");
    refuses(at + "/model.gguf", "lily pull fetches mlx-community/");
    refuses("models/missing.gguf", "is a GGUF file");  // not a hub name, though it has one slash
    refuses(at + "/sha256-of-a-blob", "is a GGUF file");
    refuses(at, "is a folder with a GGUF file");
    refuses(at + "/torch", "is a folder with a PyTorch file");
    refuses(at + "/notes.txt", "is a file; a model is a checkpoint's folder");
    refuses("models/lily-tiny/model.safetensors", "name its folder: models/lily-tiny");
  }
  // With the configuration of a checkpoint, but other weights.
  fs::copy("models/lily-tiny/config.json", folder.path() / "torch");
  expect_one_clear_line(lily("run -m " + at + "/torch x"), 1, "it is a folder with a PyTorch file");
}

TEST(Inspect, ReportsEveryTensor) {
  const Json json = Json::parse(lily("inspect --json models/lily-tiny").out);
  expect_keys(json, {"dims", "tensors", "bytes_by_class", "problems"});
  EXPECT_EQ(json["tensors"].size(), 357u);
  expect_keys(json["tensors"][0], {"name", "shape", "dtype", "bits", "group_size", "bytes"});
  int64_t sum = 0;
  for (const auto& tensor : json["tensors"]) sum += tensor["bytes"].get<int64_t>();
  EXPECT_EQ(sum, 20'784'144);
}

TEST(Inspect, TakesItsModelAsOtherCommandsDo) {
  EXPECT_EQ(lily("inspect -m models/lily-tiny").out, lily("inspect models/lily-tiny").out);
  expect_one_clear_line(lily("inspect -m models/lily-tiny models/lily-tiny"), 2, "--model");
}

TEST(List, NamesTheModelThatComesWithLily) {
  const Json list = Json::parse(lily("list --json").out);
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0]["name"], "lily-tiny");
  EXPECT_EQ(list[0]["state"], "bundled");
  EXPECT_GT(list[0]["bytes"], 1'000'000);
  EXPECT_TRUE(fs::exists(fs::path(list[0]["folder"].get<std::string>()) / "config.json"));
}

// Words of a command line, the last of them to be completed.
std::string completed(const std::string& words, int last) {
  const TempFolder folder;
  const std::string script = (folder.path() / "script").string(), shown = (folder.path() / "shown").string();
  write_file(script, lily("completions bash").out + "COMP_WORDS=(" + words + ")\nCOMP_CWORD=" +
                         std::to_string(last) + "\n_lily\nprintf '%s' \"${COMPREPLY[*]}\" >" + shown + "\n");
  EXPECT_EQ(std::system(("bash " + script).c_str()), 0);
  return read_file(shown);
}

TEST(Completions, KnowTheWordsThatACommandTakes) {
  EXPECT_EQ(completed("lily ru", 1), "run");
  EXPECT_EQ(completed("lily he", 1), "help");
  EXPECT_EQ(completed("lily help r", 2), "rm run");
  EXPECT_EQ(completed("lily completions ''", 2), "bash zsh fish");
  EXPECT_EQ(completed("lily run --kv b", 3), "bf16");
}

TEST(Plan, SaysHowManyPlanesActivationsHave) {
  const std::string plan = "plan --shape qwen3.6-35b-a3b --backend cpu ";
  EXPECT_EQ(Json::parse(lily(plan + "--json").out)["activation_planes"], 2);
  EXPECT_EQ(Json::parse(lily(plan + "--activations int8 --json").out)["activation_planes"], 1);
  EXPECT_NE(lily(plan + "--activations int8").out.find("one int8 plane"), std::string::npos);
  EXPECT_EQ(lily(plan).out.find("int8"), std::string::npos);
}

TEST(Plan, ReportsTheRealModelsBytes) {
  const Json json = Json::parse(
      lily("plan --shape qwen3.6-35b-a3b --phase decode --context 4096 --device h200 --json").out);
  expect_keys(json, {"phase", "rows", "context", "dispatches", "stages", "barriers", "weight_bytes",
                     "state_read_bytes", "state_write_bytes", "conv_state_bytes", "kv", "kv_read_bytes",
                     "kv_write_bytes", "scratch_bytes", "flops", "roofline", "disabled"});
  EXPECT_EQ(json["weight_bytes"], 1'669'561'728);
  EXPECT_EQ(json["state_read_bytes"], 62'914'560);
  EXPECT_EQ(json["state_write_bytes"], 62'914'560);
  EXPECT_EQ(json["kv_read_bytes"], 20'480 * 4096);
  EXPECT_EQ(json["roofline"]["bound"], "memory");
}

TEST(Plan, ShowsWhatAnInt8CacheSaves) {
  const std::string step =
      "plan --shape qwen3.6-35b-a3b --phase decode --context 4096 --kv int8 --json --backend ";
  for (const char* backend : {"cpu", "reference", "metal"}) {
    const Json json = Json::parse(lily(step + backend).out);
    EXPECT_EQ(json["kv"], "int8");
    EXPECT_EQ(json["kv_read_bytes"], 10'560 * 4096);
    EXPECT_EQ(json["kv_write_bytes"], 10'560);
  }
  const std::string f32 = "plan --shape qwen3.6-35b-a3b --phase decode --kv f32 --backend metal";
  expect_one_clear_line(lily(f32), 2, "--kv f32: backend 'metal' keeps keys and values as bf16, int8");
}

TEST(Plan, ShowsWhatMetalLaunchesWithoutAMac) {
  const std::string step = "plan --shape qwen3.6-35b-a3b --phase decode --context 4096 --json ";
  for (const char* target : {"--device m5-max", "--backend metal"}) {
    const Json json = Json::parse(lily(step + target).out);
    EXPECT_EQ(json["backend"], "metal");
    EXPECT_LT(json["dispatches"], 795);
    EXPECT_LE(json["stages"], 250);
    EXPECT_EQ(json["barriers"].get<int>() + 1, json["stages"].get<int>());
    EXPECT_GT(json["dispatches"], json["ops"]);
  }
  // Serial execution has more stages, and a backend that calls its ops has as many dispatches.
  const std::string chunk = "plan --shape qwen3.6-35b-a3b --phase prefill --device m5-max --json";
  EXPECT_GT(Json::parse(lily(chunk + " --disable D3").out)["stages"], Json::parse(lily(chunk).out)["stages"]);
  const Json cpu = Json::parse(lily(step + "--device m5-max --backend cpu").out);
  EXPECT_EQ(cpu["backend"], "cpu");
  EXPECT_EQ(cpu["dispatches"], cpu["ops"]);
}

TEST(Plan, ListsOneLineAnOp) {
  const Outcome run =
      lily("plan --shape qwen3.6-35b-a3b --phase prefill --rows 512 --list --backend reference");
  EXPECT_EQ(run.exit_code, 0) << run.err;
  EXPECT_NE(run.out.find("layers.39.router"), std::string::npos);
}

TEST(SelfTest, TheCpuPassesAtTheModelsWidths) {
  const Outcome run = lily("selftest --backend cpu --json");
  EXPECT_EQ(run.exit_code, 0) << run.err << run.out;
  const Json json = Json::parse(run.out);
  ASSERT_EQ(json.size(), 1u);
  EXPECT_EQ(json[0]["backend"], "cpu");
  EXPECT_GT(json[0]["ops"].size(), 10u);
  for (const Json& op : json[0]["ops"]) {
    expect_keys(op, {"op", "steps", "values", "share", "passed", "first"});
    EXPECT_TRUE(op["passed"]) << op;
  }
}

TEST(SelfTest, LeavesNoFilesWhenItIsEnded) {
  for (const char* signal : {"TERM", "HUP", "INT"}) {
    const TempFolder folder;
    const std::string command = "TMPDIR=" + folder.path().string() + " timeout -s " + signal +
                                " 0.4 " LILY_PROGRAM " selftest --backend reference >/dev/null 2>&1";
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 124)
        << signal << ": it was over before the signal came";
    EXPECT_TRUE(fs::is_empty(folder.path())) << signal;
  }
}

TEST(Inspect, ABrokenTokenizerIsAProblem) {
  TempFolder folder;
  for (const auto& entry : fs::directory_iterator("models/lily-tiny"))
    if (entry.is_regular_file())
      fs::create_symlink(fs::absolute(entry.path()), folder.path() / entry.path().filename());
  fs::remove(folder.path() / "tokenizer.json");
  const Outcome without = lily("inspect " + folder.path().string());
  EXPECT_EQ(without.exit_code, 0) << without.err;
  EXPECT_NE(without.out.find("there is no tokenizer.json"), std::string::npos) << without.out;
  write_file(folder.path() / "tokenizer.json", "{\"model\": {}}");
  const Outcome broken = lily("inspect " + folder.path().string());
  expect_one_clear_line(broken, 1, "tokenizer.json");
}

TEST(Eval, TheReferenceBesideAnEightBitCacheIsWhole) {
  const fs::path text = fs::temp_directory_path() / "lily_eval_against_test.txt";
  write_file(text, "The river is a large natural stream of water, larger than a creek. It flows to the sea.");
  const Outcome run =
      lily("eval " + kTiny +
           "--json --backend reference --kv int8 --against reference --positions 8 --text " + text.string());
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const auto report = nlohmann::json::parse(run.out);
  // With two caches of the same codes nothing would differ.
  EXPECT_GT(report.at("max_abs_logit_error").get<double>(), 0) << run.out;
  fs::remove(text);
}

TEST(Eval, ShowsItsProgress) {
  Terminal terminal("/nonexistent", {"lily", "eval", "-m", "lily-tiny", "--text", "AGENTS.md"});
  terminal.wait_for("text [");
  terminal.wait_for(" tokens");
  terminal.wait_for("perplexity");
  EXPECT_EQ(terminal.exit_code(), 0);
}

TEST(Diff, CanBeInterrupted) {
  // Ctrl-C from outside, while the slow backend is at work.
  const Outcome run = lily("diff " + kTiny +
                           "--backend reference --against reference --rows 400 --text "
                           "docs/numerics.md & pid=$!; sleep 2; kill -INT $pid; wait $pid");
  EXPECT_EQ(run.exit_code, 130) << run.out << run.err;
}

TEST(Synth, WritesACheckpointThatInspectAccepts) {
  const fs::path folder = fs::temp_directory_path() / "lily_synth_test";
  fs::remove_all(folder);
  EXPECT_EQ(lily("synth --shape lily-tiny --seed 3 " + folder.string()).exit_code, 0);
  const Outcome run = lily("inspect --json " + folder.string());
  EXPECT_EQ(run.exit_code, 0) << run.out;
  EXPECT_TRUE(Json::parse(run.out)["problems"].empty());
  EXPECT_EQ(lily("synth --shape lily-tiny " + folder.string()).exit_code, 2);  // never overwrites
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path().filename() != "model.safetensors") fs::remove(entry.path());
  EXPECT_EQ(lily("synth --shape lily-tiny " + folder.string()).exit_code, 2);  // not even a part of one
  fs::remove_all(folder);
}

// The real shapes, two layers of them: 1.5 GB on disk for some seconds.
TEST(Synth, RoutesUnevenlyAsTrainedModelsDo) {
  const test::TempFolder folder;
  const Outcome run = lily("synth --layers 2 --json " + (folder.path() / "model").string());
  ASSERT_EQ(run.exit_code, 0) << run.err;
  const Json json = Json::parse(run.out);
  EXPECT_EQ(json["routing_tokens"], 2048);
  ASSERT_EQ(json["routing"].size(), 2u);
  for (const Json& layer : json["routing"]) {
    ASSERT_EQ(layer["loads"].size(), 256u);
    int64_t sum = 0, most = 0, n_used = 0;
    for (const int64_t load : layer["loads"]) {
      sum += load;
      most = std::max(most, load);
      n_used += load > 0;
    }
    EXPECT_EQ(sum, 2048 * 8);
    const double heaviest = static_cast<double>(most) / (2048.0 * 8 / 256);
    EXPECT_GE(heaviest, 2.5);
    EXPECT_LE(heaviest, 6);
    EXPECT_NEAR(layer["heaviest"], heaviest, 1e-9);
    EXPECT_GE(n_used, 256 * 95 / 100 + 1);
    EXPECT_TRUE(layer["plausible"]);
  }
}

TEST(Synth, PrintsTheRoutingOfEachLayerUnlessToldNotTo) {
  const test::TempFolder folder;
  const auto synth = [&](const std::string& options, const char* name) {
    return lily("synth --shape lily-tiny " + options + (folder.path() / name).string());
  };
  const Outcome shown = synth("--routing 100 ", "a");
  EXPECT_NE(shown.out.find("Routing of 100 random tokens"), std::string::npos) << shown.out;
  EXPECT_EQ(std::count(shown.out.begin(), shown.out.end(), '\n'), 2 + 8) << shown.out;
  EXPECT_EQ(synth("--routing 0 ", "b").out, "");
}

TEST(Bench, MeasuresBothPhases) {
  const Json json = Json::parse(lily("bench " + kTiny + "--lengths 32,64 --rounds 2 --tokens 8 --json").out);
  expect_keys(json, {"device", "model", "results"});
  ASSERT_EQ(json["results"].size(), 4u);
  for (const Json& result : json["results"]) {
    expect_keys(result,
                {"phase", "length", "tok_s", "bytes_per_token", "gb_s", "roofline_share", "disabled"});
    EXPECT_GT(result["tok_s"]["min"], 0);
    EXPECT_LE(result["tok_s"]["min"], result["tok_s"]["median"]);
    EXPECT_LE(result["tok_s"]["median"], result["tok_s"]["max"]);
  }
}

TEST(Version, NamesBackendsAndDevices) {
  const Json json = Json::parse(lily("version --json").out);
  expect_keys(json, {"version", "commit", "backends", "devices"});
  EXPECT_NE(std::find(json["backends"].begin(), json["backends"].end(), "reference"), json["backends"].end());
}

}  // namespace
}  // namespace lily::test
