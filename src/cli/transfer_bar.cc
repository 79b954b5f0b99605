#include "cli/transfer_bar.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>

#include "cli/command.h"

namespace lily::cli {
namespace {

constexpr double kLineEveryS = 15;  // where there is no terminal
constexpr double kRateOverS = 2;
constexpr int kWidth = 24;

}  // namespace

std::string human_time(double seconds) {
  if (seconds < 99.5) return fmt::format("{:.0f} s", seconds);
  const int minutes = static_cast<int>(std::min(seconds, 3.6e7) / 60 + 0.5);
  return minutes < 100 ? fmt::format("{} min", minutes)
                       : fmt::format("{} h {} min", minutes / 60, minutes % 60);
}

TransferBar::TransferBar()
    : is_terminal_(stderr_is_terminal()), start_s_(now_s()), spoken_s_(start_s_), rate_s_(start_s_) {}

TransferBar::~TransferBar() {
  if (is_drawn_) std::fputs("\r\x1b[K", stderr);
}

void TransferBar::note(const std::string& text) {
  if (is_drawn_) std::fputs("\r\x1b[K", stderr);
  fmt::print(stderr, "lily: {}\n", text);
}

std::string TransferBar::line(const hub::PullProgress& p) {
  const double now = now_s();
  if (now - rate_s_ >= kRateOverS) {
    rate_ = static_cast<double>(p.n_fetched_bytes - rate_bytes_) / (now - rate_s_);
    rate_s_ = now, rate_bytes_ = p.n_fetched_bytes;
  } else if (rate_ <= 0) {
    rate_ = static_cast<double>(p.n_fetched_bytes) / std::max(now - start_s_, 0.1);
  }
  const double share =
      p.n_bytes == 0 ? 1 : static_cast<double>(p.n_present_bytes) / static_cast<double>(p.n_bytes);
  std::string text =
      fmt::format("{:3.0f} %  {} of {}", share * 100, human_bytes(static_cast<int64_t>(p.n_present_bytes)),
                  human_bytes(static_cast<int64_t>(p.n_bytes)));
  if (p.is_verifying) return text + ", verifying checksums";
  text += fmt::format("  {}/s", human_bytes(static_cast<int64_t>(rate_)));
  if (rate_ >= 1)
    text += fmt::format("  {} left", human_time(static_cast<double>(p.n_bytes - p.n_present_bytes) / rate_));
  return text;
}

void TransferBar::update(const hub::PullProgress& p) {
  if (!is_terminal_) {
    if (now_s() - spoken_s_ < kLineEveryS) return;
    spoken_s_ = now_s();
    fmt::print(stderr, "lily: {}\n", line(p));
    return;
  }
  const double share =
      p.n_bytes == 0 ? 1 : static_cast<double>(p.n_present_bytes) / static_cast<double>(p.n_bytes);
  std::string bar(static_cast<size_t>(kWidth), ' ');
  for (int i = 0; i < kWidth && i < share * kWidth; ++i) bar[static_cast<size_t>(i)] = '#';
  fmt::print(stderr, "\r[{}] {}\x1b[K", bar, line(p));
  std::fflush(stderr);
  is_drawn_ = true;
}

}  // namespace lily::cli
