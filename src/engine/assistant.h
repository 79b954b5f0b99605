// A loaded model that answers conversations: checkpoint, tokenizer, chat template, engine and output parser
// together. What the command line and the server share.
//
//   AnswerStream answer = assistant.start(request);
//   while (!answer.done())
//     if (auto event = answer.next_for(50ms)) ...
//
// Threads: every member may be called from any thread at any time, once the model is loaded. An AnswerStream
// belongs to one reader; cancel() may come from any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/chat_request.h"
#include "engine/disk_cache.h"
#include "engine/engine.h"
#include "engine/load.h"
#include "engine/replay.h"
#include "text/chat_template.h"
#include "text/tokenizer.h"

namespace lily::engine {

// The tokens of a prompt, and how the answer to it begins.
struct PreparedPrompt {
  std::vector<int32_t> ids;
  int32_t n_stable = 0;           // GenerateRequest::n_stable
  std::vector<int32_t> branches;  // GenerateRequest::branches
  bool starts_in_thinking = false;
  bool continues_text = false;  // the answer goes on with text of the client
  // What the conversation shows, for ReplayBook; empty where nothing is replayed.
  VisibleHash visible;
};

// One answer as it comes: PromptProgress while the prompt is read, AnswerPieces, and AnswerEnd last. Moves,
// does not copy; destroying it cancels. The assistant must outlive it.
class AnswerStream {
 public:
  class State;
  explicit AnswerStream(std::unique_ptr<State> state);
  AnswerStream(AnswerStream&&) noexcept;
  AnswerStream& operator=(AnswerStream&&) noexcept;
  ~AnswerStream();

  // Waits for at most `timeout`. Nothing if no event came, or after AnswerEnd (done() tells).
  std::optional<AnswerEvent> next_for(std::chrono::milliseconds timeout);
  bool done() const;  // AnswerEnd has been read
  // The answer ends with Finish::cancelled within one prompt chunk or one token.
  void cancel();
  uint64_t seed() const;

 private:
  std::unique_ptr<State> state_;
};

// Makes what holds an answer to its request's format, tools and thinking budget; null where nothing has to be
// held. Called from the threads that start answers; throws Error(Fault::user) for what cannot be held.
using ConstraintFactory =
    std::function<std::unique_ptr<TokenConstraint>(const ChatRequest& request, const PreparedPrompt& prompt)>;

class Assistant {
 public:
  // Opens the checkpoint and plans its memory; nothing is computed before load(). Throws what
  // Checkpoint::open, Tokenizer::load and LoadedModel throw; logs a line for a chat template that is not the
  // model's.
  Assistant(const std::string& folder, const LoadOptions& load, const EngineOptions& options = {});
  // On an executor that exists already; for tests.
  Assistant(text::Tokenizer tokenizer, model::Config config, std::unique_ptr<Executor> executor,
            const EngineOptions& options = {});
  ~Assistant();
  Assistant(const Assistant&) = delete;
  Assistant& operator=(const Assistant&) = delete;

  // Reads the weights and starts the engine. Once, and before anything that answers.
  void load(const backend::Progress& progress = {});
  // Before the first answer. load() sets the grammar's (engine/grammar/grammar_compiler.h) where nothing was
  // set.
  void set_constraints(ConstraintFactory factory) { constraints_ = std::move(factory); }

  // Earlier answers that are remembered token for token (engine/replay.h), in bytes; 0 turns it off. Before
  // the first answer.
  void set_replay(size_t max_bytes);
  size_t replay_bytes() const { return replay_ ? replay_->n_bytes() : 0; }  // that are in use

  // Names the program, on whose arithmetic saved states depend.
  void set_build(std::string build) { build_ = std::move(build); }
  // States and answers are kept in this folder too. After set_build() and before load(); throws
  // Error(Fault::user) for a folder that cannot be used.
  void set_disk_cache(DiskCacheOptions options);
  DiskCache* disk_cache() { return disk_.get(); }  // null: none

  // Throw Error(Fault::user) for a request that cannot be answered (ContextExceeded among them), QueueFull.
  AnswerStream start(const ChatRequest& request);
  AnswerStream start(const TextRequest& request);

  // Writes a conversation whose last answer has been given, with its state if that is still remembered.
  // `messages` is the same in the caller's own form. Throws Error(Fault::device) where the disk fails.
  void save_session(const std::filesystem::path& path, const ChatRequest& conversation, std::string messages);
  // What save_session() was given. The conversation then goes on as if it had never ended, if the state in
  // the file is this model's and undamaged: has_state. Throws Error for a file that is no saved conversation.
  struct SavedSession {
    std::string messages;
    bool has_state = false;
  };
  SavedSession load_session(const std::filesystem::path& path);

  // Normalised, rendered and tokenised; before load() too.
  PreparedPrompt prepare(const ChatRequest& request) const;
  std::string rendered(const ChatRequest& request) const;  // the same as text

  const text::Tokenizer& tokenizer() const { return tokenizer_; }
  const std::string& folder() const { return folder_; }
  const std::string& backend() const { return backend_; }
  const model::Config& config() const { return config_; }
  int context() const;  // tokens of prompt and answer, at most
  Engine& engine() { return *engine_; }
  const LoadedModel* model() const { return model_.get(); }  // null on an executor

 private:
  std::string identity() const;  // of saved sessions
  ConstraintFactory grammar_constraints() const;
  SamplingParams sampling(const SamplingOverrides& overrides) const;

  std::string folder_, backend_, build_;
  std::unique_ptr<model::Checkpoint> checkpoint_;
  text::Tokenizer tokenizer_;
  model::Config config_;
  std::unique_ptr<LoadedModel> model_;
  EngineOptions options_;
  ConstraintFactory constraints_;
  std::optional<int32_t> end_of_turn_;  // the token that the template closes a turn with
  std::unique_ptr<DiskCache> disk_;     // null: none; outlives the two below
  std::unique_ptr<ReplayBook> replay_;  // null: off
  std::unique_ptr<Engine> engine_;      // ends before what it uses
};

}  // namespace lily::engine
