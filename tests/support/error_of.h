// The message of the lily::Error that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/error.h"

namespace lily::test {

// Empty, and a failed test, if nothing is thrown or the message is not one line.
template <typename Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(message.find_first_of("\n\r"), std::string::npos) << message;
    EXPECT_FALSE(message.empty());
    return message;
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

}  // namespace lily::test
