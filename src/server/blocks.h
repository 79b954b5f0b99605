// An answer as a sequence of blocks that never interleave: thinking, text, call, text ... The base of the
// writers whose wire formats open and close such blocks.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "server/dialect.h"

namespace lily::server {

struct Block {
  enum class Kind { reasoning, text, call };
  Kind kind = Kind::text;
  std::string id;         // of a call
  std::string name;       // of a call
  std::string text;       // what the block says; of a call its arguments
  bool complete = false;  // false: the answer was cut within it
};

class BlockWriter : public AnswerWriter {
 public:
  // `id_prefix`: of calls.
  explicit BlockWriter(std::string id_prefix) : id_prefix_(std::move(id_prefix)) {}

  std::string event(const engine::AnswerEvent& event) final;

 protected:
  // Each appends what goes on the wire. `index` counts the blocks; block.text holds the delta already.
  virtual void on_progress(const engine::PromptProgress& progress, std::string& out);
  virtual void on_first_piece(std::string&) {}  // before anything of the answer, or before its end
  virtual void on_open(Block& block, size_t index, std::string& out) = 0;
  virtual void on_delta(const Block& block, size_t index, const std::string& delta, std::string& out) = 0;
  virtual void on_close(const Block& block, size_t index, std::string& out) = 0;
  virtual void on_end(std::string& out) = 0;  // end() is set

  const std::vector<Block>& blocks() const { return blocks_; }
  const engine::AnswerEnd& end() const { return end_; }

 private:
  void take(const text::OutputEvent& event, std::string& out);
  void open(Block block, std::string& out);
  void close(bool complete, std::string& out);

  const std::string id_prefix_;
  std::vector<Block> blocks_;
  bool is_open_ = false;  // the last block
  bool has_begun_ = false;
  engine::AnswerEnd end_;
};

}  // namespace lily::server
