// Who is next: short requests go before long ones, and none waits for ever.
#include <gtest/gtest.h>

#include "engine/request_queue.h"
#include "tests/engine/engine_fixture.h"

namespace lily::engine {
namespace {

int64_t prompt_size(const GenerateRequest& request) { return std::ssize(request.prompt); }

void push(RequestQueue& queue, int n_tokens) {
  queue.push({.request = greedy(prompt_of(n_tokens, 1), 1), .channel = nullptr, .arrived = {}});
}
int64_t take(RequestQueue& queue) {
  if (queue.next(prompt_size) == nullptr) return 0;
  return prompt_size(queue.take_next().request);
}

TEST(RequestQueue, EqualOnesKeepTheirOrder) {
  RequestQueue queue;
  for (uint64_t i = 0; i < 3; ++i)
    queue.push({.request = greedy(prompt_of(5, i), 1), .channel = nullptr, .arrived = {}});
  for (uint64_t i = 0; i < 3; ++i) {
    ASSERT_NE(queue.next(prompt_size), nullptr);
    EXPECT_EQ(queue.take_next().request.prompt, prompt_of(5, i));
  }
  EXPECT_EQ(queue.next(prompt_size), nullptr);
}

TEST(RequestQueue, AShortOneWaitsForOneOfTheLongOnes) {
  RequestQueue queue;
  for (int i = 0; i < 10; ++i) push(queue, 300);
  EXPECT_EQ(take(queue), 300);
  push(queue, 5);
  EXPECT_EQ(take(queue), 300);
  EXPECT_EQ(take(queue), 5);
  EXPECT_EQ(take(queue), 300);
}

TEST(RequestQueue, ALongOneWaitsForTwiceAsManyAsWereBeforeIt) {
  RequestQueue queue;
  for (int i = 0; i < 9; ++i) push(queue, 10);
  push(queue, 300);
  int n_taken = 0;
  for (; n_taken < 1000; ++n_taken) {
    push(queue, 5);
    if (take(queue) == 300) break;
  }
  EXPECT_EQ(n_taken, 19);
}

TEST(RequestQueue, EachIsWeighedOnce) {
  RequestQueue queue;
  push(queue, 7);
  push(queue, 3);
  int n_weighed = 0;
  const auto weigh = [&](const GenerateRequest& request) { return ++n_weighed, prompt_size(request); };
  const Pending* first = queue.next(weigh);
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(std::ssize(first->request.prompt), 3);
  EXPECT_EQ(queue.next(weigh), first);
  EXPECT_EQ(n_weighed, 2);
  queue.remove_if([](const Pending& pending) { return pending.request.prompt.size() == 3; });
  EXPECT_EQ(queue.size(), 1);
  EXPECT_EQ(take(queue), 7);
}

}  // namespace
}  // namespace lily::engine
