#include "cli/bench_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <vector>

#include "base/error.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kWidth = 460, kHeight = 320, kLeft = 64, kRight = 16, kTop = 44, kBottom = 44;
constexpr const char *kOwnColour = "#0b6e4f", *kPeerColour = "#b4532a";

struct Point {
  double length, median, min, max;
};

// Where a value lies between two others, on a logarithmic scale.
double share(double value, double low, double high) {
  return high > low ? (std::log(value) - std::log(low)) / (std::log(high) - std::log(low)) : 0.5;
}

// 1, 2 and 5 times powers of ten; more of them where these would be few.
std::vector<double> round_numbers(double low, double high) {
  const std::vector<double> factors =
      high / low > 8 ? std::vector<double>{1, 2, 5} : std::vector<double>{1, 1.5, 2, 2.5, 3, 4, 5, 6, 8};
  std::vector<double> numbers;
  const auto exponent_of = [](double value) { return static_cast<int>(std::floor(std::log10(value))); };
  for (int exponent = exponent_of(low); exponent <= exponent_of(high); ++exponent) {
    const double power = std::pow(10, exponent);
    for (const double factor : factors)
      if (factor * power >= low * 0.999 && factor * power <= high * 1.001) numbers.push_back(factor * power);
  }
  return numbers;
}

std::string tick(double value) {
  return value >= 1000 ? fmt::format("{:g}K", value / 1000) : fmt::format("{:g}", value);
}

class Panel {
 public:
  Panel(double x, std::string title) : x_(x), title_(std::move(title)) {}

  void add(std::vector<Point> points, const char* colour) {
    if (points.empty()) return;
    for (const Point& p : points) {
      lengths_.push_back(p.length);
      low_ = std::min(low_, p.min);
      high_ = std::max(high_, p.max);
    }
    lines_.push_back({std::move(points), colour});
  }

  std::string draw() {
    if (lines_.empty()) return {};
    std::sort(lengths_.begin(), lengths_.end());
    lengths_.erase(std::unique(lengths_.begin(), lengths_.end()), lengths_.end());
    low_ /= 1.25;
    high_ *= 1.25;
    std::string out = fmt::format("<text x=\"{}\" y=\"{}\" class=\"title\">{}</text>\n", x_ + kLeft,
                                  kTop - 14, escaped(title_));
    for (const double value : round_numbers(low_, high_))
      out += fmt::format(
          "<line x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\" class=\"grid\"/>\n"
          "<text x=\"{3}\" y=\"{4:.1f}\" class=\"y\">{5}</text>\n",
          x_ + kLeft, x_ + kWidth - kRight, y_of(value), x_ + kLeft - 6, y_of(value) + 4, tick(value));
    for (const double length : lengths_)
      out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" class=\"x\">{}</text>\n", x_of(length),
                         kHeight - kBottom + 18,
                         length >= 1024 && std::fmod(length, 1024) == 0 ? fmt::format("{:g}K", length / 1024)
                                                                        : fmt::format("{:g}", length));
    for (const Line& line : lines_) {
      std::string path;
      for (const Point& p : line.points) {
        path += fmt::format("{}{:.1f},{:.1f}", path.empty() ? "M" : " L", x_of(p.length), y_of(p.median));
        out += fmt::format(
            "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1:.1f}\" y2=\"{2:.1f}\" stroke=\"{3}\"/>\n"
            "<circle cx=\"{0:.1f}\" cy=\"{4:.1f}\" r=\"3.5\" fill=\"{3}\"/>\n",
            x_of(p.length), y_of(p.min), y_of(p.max), line.colour, y_of(p.median));
      }
      out +=
          fmt::format("<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n", path, line.colour);
    }
    return out;
  }

 private:
  struct Line {
    std::vector<Point> points;
    const char* colour;
  };
  double x_of(double length) const {
    return x_ + kLeft + 12 +
           share(length, lengths_.front(), lengths_.back()) * (kWidth - kLeft - kRight - 24);
  }
  double y_of(double value) const {
    return kHeight - kBottom - share(value, low_, high_) * (kHeight - kTop - kBottom);
  }

  double x_;
  std::string title_;
  std::vector<Line> lines_;
  std::vector<double> lengths_;
  double low_ = 1e300, high_ = 0;
};

Point point_of(const Json& result, const Json& tok_s) {
  return {result["length"].get<double>(), tok_s["median"].get<double>(), tok_s["min"].get<double>(),
          tok_s["max"].get<double>()};
}

}  // namespace

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text)
    out += c == '<' ? "&lt;" : c == '&' ? "&amp;" : c == '>' ? "&gt;" : std::string(1, c);
  return out;
}

std::string plot_svg(const Json& document) {
  std::string panels, peer_name;
  int n_panels = 0;
  for (const std::string phase : {"prefill", "decode"}) {
    std::vector<Point> own, peer;
    for (const Json& result : document["results"]) {
      if (result["phase"] != phase) continue;
      own.push_back(point_of(result, result["tok_s"]));
      if (!result.contains("peer")) continue;
      peer.push_back(point_of(result, result["peer"]["tok_s"]));
      peer_name = result["peer"]["name"];
    }
    if (own.empty()) continue;
    Panel panel(n_panels++ * kWidth, phase + ", tokens a second by context");
    panel.add(std::move(own), kOwnColour);
    panel.add(std::move(peer), kPeerColour);
    panels += panel.draw();
  }
  std::string legend = fmt::format("<tspan fill=\"{}\">lily</tspan>", kOwnColour);
  if (!peer_name.empty())
    legend += fmt::format(" · <tspan fill=\"{}\">{}</tspan>", kPeerColour, escaped(peer_name));
  legend += " · " + escaped(document["device"]["name"].get<std::string>());
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n"
      "<style>.grid{{stroke:#ddd}}.x{{text-anchor:middle}}.y{{text-anchor:end}}.title{{font-weight:bold}}</"
      "style>\n"
      "<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n{2}<text x=\"{3}\" "
      "y=\"{4}\">{5}</text>\n</svg>\n",
      kWidth * std::max(n_panels, 1), kHeight, panels, kLeft, kHeight - 8, legend);
}

void write_plot(const Json& document, const std::string& path) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << plot_svg(document);
  out.close();
  if (!out) fail(Fault::user, "--plot {}: cannot be written", path);
}

}  // namespace lily::cli
