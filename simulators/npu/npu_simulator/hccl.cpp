// The backend "hccl" of the simulated NPU: gloo on the NPU tensors' memory, for the types that HCCL documents.

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <set>
#include <string>
#include <vector>

namespace {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using Types = std::set<at::ScalarType>;

// What torch_npu's documentation lists for the collectives. all_gather also takes int64 here, which torch's own
// DistributedDataParallel gathers; what else only moves tensors has no list there, and takes the same.
const Types REDUCED = {at::kBFloat16, at::kHalf, at::kFloat, at::kInt, at::kLong, at::kBool};
const Types SCATTERED = {at::kBFloat16, at::kHalf, at::kFloat, at::kChar, at::kInt};
const Types EXCHANGED = {at::kFloat};
const Types MOVED = {at::kBFloat16, at::kHalf, at::kFloat, at::kChar, at::kInt, at::kLong, at::kBool};

void check(const char* name, const Types& types, const at::Tensor& tensor) {
    TORCH_CHECK(tensor.is_privateuseone(), "hccl ", name, ": a tensor on an NPU is expected, not on ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "hccl ", name, ": Tensors must be contiguous");
    if (types.count(tensor.scalar_type())) return;
    std::string known;
    for (const auto type : types) known += std::string(known.empty() ? "" : ", ") + c10::toString(type);
    TORCH_CHECK(false, "hccl ", name, ": ", tensor.scalar_type(), " is not among the types that HCCL documents: ",
                known);
}

// The same memory as a tensor of the host, which keeps the memory alive until a collective that runs behind is done.
at::Tensor host(const at::Tensor& tensor) {
    auto* owner = new at::Tensor(tensor);
    return at::from_blob(
        tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [owner](void*) { delete owner; },
        tensor.options().device(c10::kCPU));
}

Tensors hosts(const char* name, const Types& types, const Tensors& tensors) {
    Tensors found;
    for (const auto& tensor : tensors) {
        check(name, types, tensor);
        found.push_back(host(tensor));
    }
    return found;
}

std::vector<Tensors> hosts(const char* name, const Types& types, const std::vector<Tensors>& lists) {
    std::vector<Tensors> found;
    for (const auto& list : lists) found.push_back(hosts(name, types, list));
    return found;
}

class SimulatedHccl : public c10d::Backend {
 public:
    SimulatedHccl(c10::intrusive_ptr<c10d::Backend> gloo)
        : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

    const std::string getBackendName() const override { return "hccl"; }
    void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
    uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

    c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
        auto own = hosts("broadcast", MOVED, tensors);
        return gloo_->broadcast(own, options);
    }

    c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
        auto own = hosts("all_reduce", REDUCED, tensors);
        return reduced(own, options, [&](const auto& chosen) { return gloo_->allreduce(own, chosen); });
    }

    c10::intrusive_ptr<Work> allreduce_coalesced(
        Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
        auto own = hosts("all_reduce", REDUCED, tensors);
        return gloo_->allreduce_coalesced(own, options);
    }

    c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
        auto own = hosts("reduce", REDUCED, tensors);
        return gloo_->reduce(own, options);
    }

    c10::intrusive_ptr<Work> allgather(
        std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        auto from = hosts("all_gather", MOVED, inputs);
        auto to = hosts("all_gather", MOVED, outputs);
        return gloo_->allgather(to, from, options);
    }

    c10::intrusive_ptr<Work> _allgather_base(
        at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
        check("all_gather", MOVED, output);
        check("all_gather", MOVED, input);
        auto to = host(output), from = host(input);
        return gloo_->_allgather_base(to, from, options);
    }

    c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
        Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
        auto to = hosts("all_gather", MOVED, outputs), from = hosts("all_gather", MOVED, inputs);
        return gloo_->allgather_into_tensor_coalesced(to, from, options);
    }

    c10::intrusive_ptr<Work> gather(
        std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
        auto from = hosts("gather", MOVED, inputs);
        auto to = hosts("gather", MOVED, outputs);
        return gloo_->gather(to, from, options);
    }

    c10::intrusive_ptr<Work> scatter(
        Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
        auto to = hosts("scatter", MOVED, outputs);
        auto from = hosts("scatter", MOVED, inputs);
        return gloo_->scatter(to, from, options);
    }

    c10::intrusive_ptr<Work> reduce_scatter(
        Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
        auto to = hosts("reduce_scatter", SCATTERED, outputs);
        auto from = hosts("reduce_scatter", SCATTERED, inputs);
        return reduced(to, options, [&](const auto& chosen) { return gloo_->reduce_scatter(to, from, chosen); });
    }

    c10::intrusive_ptr<Work> _reduce_scatter_base(
        at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
        auto to = hosts("reduce_scatter", SCATTERED, Tensors{output});
        auto from = hosts("reduce_scatter", SCATTERED, Tensors{input});
        return reduced(
            to, options, [&](const auto& chosen) { return gloo_->_reduce_scatter_base(to[0], from[0], chosen); });
    }

    c10::intrusive_ptr<Work> alltoall_base(
        at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
        const c10d::AllToAllOptions& options) override {
        check("all_to_all", EXCHANGED, output);
        check("all_to_all", EXCHANGED, input);
        auto to = host(output), from = host(input);
        return gloo_->alltoall_base(to, from, output_sizes, input_sizes, options);
    }

    c10::intrusive_ptr<Work> send(Tensors& tensors, int to, int tag) override {
        auto own = hosts("send", MOVED, tensors);
        return gloo_->send(own, to, tag);
    }

    c10::intrusive_ptr<Work> recv(Tensors& tensors, int from, int tag) override {
        auto own = hosts("recv", MOVED, tensors);
        return gloo_->recv(own, from, tag);
    }

    c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override { return gloo_->barrier(options); }

 private:
    // gloo has no average: it sums, and the sum is divided here, when it is there.
    template <typename Options, typename Run>
    c10::intrusive_ptr<Work> reduced(Tensors& results, const Options& options, Run run) {
        if (!(options.reduceOp == c10d::ReduceOp::AVG)) return run(options);
        auto chosen = options;
        chosen.reduceOp = c10d::ReduceOp::SUM;
        auto work = run(chosen);
        work->wait();
        for (auto& result : results) result.div_(getSize());
        return work;
    }

    c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

PYBIND11_MODULE(hccl, module) {
    module.def(
        "create",
        [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
            return c10::make_intrusive<SimulatedHccl>(gloo);
        },
        "A backend that runs collectives of NPU tensors on `gloo`.");
}
