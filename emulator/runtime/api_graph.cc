// Stream capture and graphs.
#include "runtime/api.h"

namespace sonicmoe::emulator {
namespace {

Handles<Graph, cudaGraph_t>& graphs() {
  static auto& all = *new Handles<Graph, cudaGraph_t>;
  return all;
}

Handles<Graph, cudaGraphExec_t>& executables() {
  static auto& all = *new Handles<Graph, cudaGraphExec_t>;
  return all;
}

}  // namespace
}  // namespace sonicmoe::emulator

using namespace sonicmoe::emulator;

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  return device_call([&] {
    const auto captured = stream_of(stream);
    const std::lock_guard lock(issue_mutex());
    begin_capture(captured, mode);
  });
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return device_call([&] {
    *graph = nullptr;
    const auto captured = stream_of(stream);
    const std::lock_guard lock(issue_mutex());
    const auto capture = captured->capture;
    require(capture != nullptr, cudaErrorIllegalState);
    *graph = graphs().add(std::make_shared<Graph>(capture->end(*captured)));
  });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  return device_call(
      [&] { *executable = executables().add(std::make_shared<Graph>(*graphs().find(graph))); });
}

cudaError_t cudaGraphUpload(cudaGraphExec_t executable, cudaStream_t stream) {
  return device_call([&] {
    executables().find(executable);
    stream_of(stream);
  });
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  return device_call([&] {
    const auto graph = executables().find(executable);
    const auto stream = stream_of(handle);
    const std::lock_guard lock(issue_mutex());
    for (const Action& action : graph->actions) issue(*stream, action);
  });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  return status_of([&] { executables().remove(executable); });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  return status_of([&] { graphs().remove(graph); });
}
