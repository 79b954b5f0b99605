// msl_rewriter SYMBOL NAME INPUT OUTPUT: preprocessed Metal source to C++.
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>

#include "emulator/rewriter/lint.h"
#include "emulator/rewriter/rewrite.h"

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: msl_rewriter SYMBOL NAME INPUT OUTPUT\n");
    return 2;
  }
  try {
    std::ifstream in(argv[3]);
    if (!in) throw std::runtime_error(std::string("cannot read ") + argv[3]);
    const std::string source((std::istreambuf_iterator<char>(in)), {});
    const auto tokens = lily::emulator::tokenize(source);
    const auto errors = lily::emulator::lint(tokens);
    for (const auto& error : errors) std::fprintf(stderr, "%s\n", error.c_str());
    if (!errors.empty()) return 1;
    std::ofstream out(argv[4]);
    out << lily::emulator::rewrite(tokens, argv[1], argv[2]);
    if (!out.flush()) throw std::runtime_error(std::string("cannot write ") + argv[4]);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
