#include "cli/ablate_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "cli/bench_plot.h"

namespace lily::cli {
namespace {

using Json = nlohmann::ordered_json;

constexpr double kBarsWidth = 720, kBarsLeft = 190, kBarsRight = 90, kBarsTop = 44, kBar = 24,
                 kBarsBottom = 34;
constexpr const char *kGainColour = "#0b6e4f", *kLossColour = "#b4532a";

}  // namespace

std::string gains_svg(const Json& rows, const std::string& device) {
  double low = 0, high = 0.05;
  int n_bars = 0;
  for (const Json& row : rows) {
    if (!row["gain"].is_number()) continue;
    low = std::min(low, row["gain_min"].get<double>());
    high = std::max(high, row["gain_max"].get<double>());
    ++n_bars;
  }
  const auto x_of = [&](double gain) {
    return kBarsLeft + (gain - low) / (high - low) * (kBarsWidth - kBarsLeft - kBarsRight);
  };
  std::string bars;
  double y = kBarsTop;
  for (const Json& row : rows) {
    if (!row["gain"].is_number()) continue;
    const double gain = row["gain"];
    const double from = x_of(std::min(gain, 0.0)), to = x_of(std::max(gain, 0.0));
    bars += fmt::format(
        "<text x=\"{0}\" y=\"{1:.1f}\" text-anchor=\"end\">{2} · {3} {4}</text>\n"
        "<rect x=\"{5:.1f}\" y=\"{6:.1f}\" width=\"{7:.1f}\" height=\"{8}\" fill=\"{9}\"/>\n"
        "<line x1=\"{10:.1f}\" x2=\"{11:.1f}\" y1=\"{12:.1f}\" y2=\"{12:.1f}\" stroke=\"#333\"/>\n"
        "<text x=\"{13:.1f}\" y=\"{1:.1f}\">{14:+.1f} %</text>\n",
        kBarsLeft - 8, y + 15, escaped(row["id"].get<std::string>()), row["phase"].get<std::string>(),
        row["length"].get<int>(), from, y + 3, std::max(to - from, 1.0), kBar - 8,
        gain < 0 ? kLossColour : kGainColour, x_of(row["gain_min"]), x_of(row["gain_max"]), y + 11,
        x_of(std::max(row["gain_max"].get<double>(), 0.0)) + 8, gain * 100);
    y += kBar;
  }
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\" "
      "font-size=\"12\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n"
      "<text x=\"16\" y=\"24\" font-weight=\"bold\">gain of each mechanism, on against off</text>\n{2}"
      "<line x1=\"{3:.1f}\" x2=\"{3:.1f}\" y1=\"{4}\" y2=\"{5}\" stroke=\"#333\"/>\n"
      "<text x=\"16\" y=\"{6}\">{7}</text>\n</svg>\n",
      kBarsWidth, kBarsTop + n_bars * kBar + kBarsBottom, bars, x_of(0), kBarsTop, kBarsTop + n_bars * kBar,
      kBarsTop + n_bars * kBar + 24, escaped(device));
}

void write_gains(const Json& rows, const std::string& device, const std::string& path) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out << gains_svg(rows, device);
  out.close();
  if (!out) fail(Fault::user, "--plot {}: cannot be written", path);
}

}  // namespace lily::cli
