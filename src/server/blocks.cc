#include "server/blocks.h"

#include <utility>

namespace lily::server {

void BlockWriter::on_progress(const engine::PromptProgress&, std::string&) {}

std::string BlockWriter::event(const engine::AnswerEvent& event) {
  std::string out;
  if (const auto* progress = std::get_if<engine::PromptProgress>(&event)) {
    on_progress(*progress, out);
    return out;
  }
  if (const auto* end = std::get_if<engine::AnswerEnd>(&event)) end_ = *end;
  if (!has_begun_) {
    has_begun_ = true;
    on_first_piece(out);
  }
  if (const auto* piece = std::get_if<engine::AnswerPiece>(&event)) {
    for (const text::OutputEvent& e : piece->events) take(e, out);
    return out;
  }
  // Text and thinking cannot be told from whole ones when their answer is cut; a call can.
  if (is_open_) close(end_.finish != engine::Finish::length, out);
  on_end(out);
  return out;
}

void BlockWriter::take(const text::OutputEvent& event, std::string& out) {
  using Kind = text::OutputEvent::Kind;
  const auto delta = [&](Block::Kind kind) {
    if (!is_open_ || blocks_.back().kind != kind) open({.kind = kind}, out);
    blocks_.back().text += event.text;
    on_delta(blocks_.back(), blocks_.size() - 1, event.text, out);
  };
  switch (event.kind) {
    case Kind::reasoning:
      return delta(Block::Kind::reasoning);
    case Kind::content:
      return delta(Block::Kind::text);
    case Kind::call_begin:
      return open({.kind = Block::Kind::call, .id = call_id(id_prefix_, event), .name = event.text}, out);
    case Kind::call_arguments:
      return delta(Block::Kind::call);
    case Kind::call_end:
      return close(true, out);
  }
}

void BlockWriter::open(Block block, std::string& out) {
  if (is_open_) close(true, out);
  blocks_.push_back(std::move(block));
  is_open_ = true;
  on_open(blocks_.back(), blocks_.size() - 1, out);
}

void BlockWriter::close(bool complete, std::string& out) {
  if (!is_open_) return;
  is_open_ = false;
  blocks_.back().complete = complete;
  on_close(blocks_.back(), blocks_.size() - 1, out);
}

}  // namespace lily::server
