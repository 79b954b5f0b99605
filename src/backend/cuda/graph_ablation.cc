#include "backend/cuda/graph_ablation.h"

#include <vector>

#include "backend/cuda/check.h"

namespace lily::cuda {
namespace {

// CUDA 13 gave the functions with edge data their plain names.
#if CUDART_VERSION < 13000
constexpr auto get_edges = cudaGraphGetEdges_v2;
constexpr auto remove_edges = cudaGraphRemoveDependencies_v2;
constexpr auto add_edges = cudaGraphAddDependencies_v2;
#else
constexpr auto get_edges = cudaGraphGetEdges;
constexpr auto remove_edges = cudaGraphRemoveDependencies;
constexpr auto add_edges = cudaGraphAddDependencies;
#endif

}  // namespace

void remove_overlap(cudaGraph_t graph) {
  size_t n = 0;
  check(get_edges(graph, nullptr, nullptr, nullptr, &n), "counting a graph's edges");
  if (n == 0) return;
  std::vector<cudaGraphNode_t> from(n), to(n);
  std::vector<cudaGraphEdgeData> data(n);
  check(get_edges(graph, from.data(), to.data(), data.data(), &n), "reading a graph's edges");
  check(remove_edges(graph, from.data(), to.data(), data.data(), n), "removing a graph's edges");
  const std::vector<cudaGraphEdgeData> ordinary(n, cudaGraphEdgeData{});
  check(add_edges(graph, from.data(), to.data(), ordinary.data(), n), "adding a graph's edges");
}

}  // namespace lily::cuda
