#include "base/random_name.h"

#include <random>
#include <string_view>

namespace lily {

std::string random_name(int n_characters) {
  constexpr std::string_view kLetters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  thread_local std::random_device device;
  std::uniform_int_distribution<size_t> any(0, kLetters.size() - 1);
  std::string name;
  for (int i = 0; i < n_characters; ++i) name += kLetters[any(device)];
  return name;
}

}  // namespace lily
