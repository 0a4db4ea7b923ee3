// The aten kernels of the simulated NPU: torch's own CPU kernels on the NPU tensors' memory, which is the host's.
//
//   npu tensors ──the same memory as CPU tensors──▶ CPU kernel ──▶ written in place, or copied to new npu memory
//
// torch_npu's registrations are kept where they only manage memory (`KEPT`); a kernel that torch composes from other
// operators runs as composed; everything else that torch_npu registers and the CPU has goes through `on_the_cpu`.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using Stack = torch::jit::Stack;

const std::set<std::string> KEPT = {
    "empty.memory_format", "empty_strided", "empty_with_format", "unsafe_empty_with_format",
    "empty_with_swapped_memory", "_reshape_alias", "as_strided", "as_strided_", "view", "view_as_real",
    "view_as_complex", "set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor",
    "resize_", "resize_as_", "is_set_to", "record_stream", "is_pinned", "_pin_memory", "squeeze", "squeeze.dim",
    "unsqueeze", "get_npu_format", "get_storage_size", "copy_memory_", "npu_change_data_ptr",
    "scaled_dot_product_attention",  // torch_npu's own: it chooses layout, mask and sparse mode of the fused operator
};

// Operators that take tensors of the host beside those of the device, as they do on every accelerator.
const std::set<std::string> MIXED = {
    "copy_", "_copy_from", "_copy_from_and_resize", "_foreach_copy_", "index.Tensor", "index_put_", "index_put",
    "_index_put_impl_", "_unsafe_index.Tensor", "_unsafe_index_put",
};

// --- tensors of the host on the memory of the device ----------------------------------------------------------------

struct Twin {
    at::Tensor device, host;
    void* memory;  // of the host's storage when it was made
};

struct Call {
    std::vector<Twin> twins;
    std::unordered_map<c10::StorageImpl*, c10::Storage> storages;  // of the device → of the host
    c10::Device device = c10::Device(c10::kPrivateUse1, -1);

    c10::Storage storage_of(const at::Tensor& tensor) {
        auto* own = tensor.storage().unsafeGetStorageImpl();
        auto found = storages.find(own);
        if (found == storages.end()) {
            void* memory = tensor.storage().mutable_data();
            c10::Storage host(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                              c10::DataPtr(memory, c10::kCPU), at::getCPUAllocator(), /*resizable=*/true);
            found = storages.emplace(own, host).first;
        }
        return found->second;
    }

    at::Tensor host(const at::Tensor& tensor) {
        if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
        if (device.index() < 0) device = tensor.device();
        for (const auto& twin : twins)
            if (twin.device.is_same(tensor)) return twin.host;
        auto storage = storage_of(tensor);
        auto made = at::detail::make_tensor<c10::TensorImpl>(
            std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
        made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        if (tensor.is_conj()) made._set_conj(true);
        if (tensor.is_neg()) made._set_neg(true);
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
        twins.push_back({tensor, made, made.storage().mutable_data()});
        return made;
    }

    // A kernel may have given an `out` tensor another shape, and other memory with it.
    void write_back() {
        for (auto& twin : twins) {
            const bool moved = twin.host.storage().data() != twin.memory;
            if (moved) {
                twin.device.resize_(twin.host.sizes());
                auto target = Call().host(twin.device);
                target.copy_(twin.host);
            } else if (twin.host.sizes() != twin.device.sizes() || twin.host.strides() != twin.device.strides()) {
                twin.device.unsafeGetTensorImpl()->set_sizes_and_strides(
                    twin.host.sizes(), twin.host.strides(), twin.host.storage_offset());
            }
        }
    }

    at::Tensor back(const at::Tensor& result) {
        if (!result.defined() || !result.is_cpu()) return result;
        for (const auto& twin : twins)
            if (twin.host.is_same(result)) return twin.device;
        for (const auto& twin : twins)  // a view of an argument
            if (result.has_storage() && twin.host.storage().is_alias_of(result.storage()) &&
                result.storage().data() == twin.memory) {
                auto view = at::empty({0}, twin.device.options());
                return view.set_(twin.device.storage(), result.storage_offset(), result.sizes(), result.strides());
            }
        auto fresh = at::empty_strided(result.sizes(), result.strides(), result.options().device(device));
        if (result.is_non_overlapping_and_dense())
            std::memcpy(fresh.mutable_data_ptr(), result.const_data_ptr(), result.nbytes());
        else if (fresh.numel() > 0)
            Call().host(fresh).copy_(result);
        return fresh;
    }
};

// --- random numbers: a function of the generator's seed and offset, as on the card ----------------------------------

uint64_t mixed(uint64_t seed, uint64_t offset) {
    if (offset == 0) return seed;
    uint64_t x = seed + 0x9E3779B97F4A7C15ULL * offset;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
    return x ^ (x >> 31);
}

uint64_t next_seed(at::Generator generator) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    const auto offset = generator.get_offset();
    generator.set_offset(offset + 4);
    return mixed(generator.current_seed(), offset);
}

bool is_generator(const c10::Argument& argument) {
    const auto type = argument.type();
    if (auto optional = type->cast<c10::OptionalType>())
        return optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
    return type->kind() == c10::TypeKind::GeneratorType;
}

// While it lives, the host's default generator draws what a card's would; then it is as it was.
struct Lent {
    at::Generator own = at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
    at::Tensor state = own.get_state();

    explicit Lent(uint64_t seed) { own.set_current_seed(seed); }
    ~Lent() { own.set_state(state); }
};

// Operators that draw and take no generator.
const std::set<std::string> DRAWING = {"native_dropout"};

// --- the boxed kernel -----------------------------------------------------------------------------------------------

std::string short_name(const OperatorHandle& op) {
    const auto& name = op.operator_name();
    auto base = name.name.substr(name.name.find("::") + 2);
    return name.overload_name.empty() ? base : base + "." + name.overload_name;
}

void refuse_mixture(const OperatorHandle& op, const Call& call, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    TORCH_CHECK(!tensor.is_cpu() || tensor.dim() == 0 || MIXED.count(short_name(op)),
                "Expected all tensors to be on the same device. Expected NPU tensor, please check whether the input "
                "tensor device is correct. (", op.operator_name(), " got a CPU tensor of shape ", tensor.sizes(), ")");
    TORCH_CHECK(!tensor.is_privateuseone() || call.device.index() < 0 || tensor.device() == call.device ||
                    MIXED.count(short_name(op)),
                "Expected all tensors to be on the same device, but found at least two devices, ", call.device, " and ",
                tensor.device(), "! (", op.operator_name(), ")");
}

IValue hosted(const OperatorHandle& op, Call& call, const IValue& value, bool has_npu) {
    const auto one = [&](const at::Tensor& tensor) {
        if (has_npu) refuse_mixture(op, call, tensor);
        return call.host(tensor);
    };
    if (value.isTensor()) return one(value.toTensor());
    if (value.isTensorList()) {
        std::vector<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(one(tensor));
        return IValue(list);
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& entry : value.toOptionalTensorVector())
            list.push_back(entry.has_value() ? std::optional<at::Tensor>(one(*entry)) : std::nullopt);
        return IValue(list);
    }
    return value;
}

bool any_npu(const IValue& value) {
    if (value.isTensor()) return value.toTensor().defined() && value.toTensor().is_privateuseone();
    if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorVector())
            if (tensor.defined() && tensor.is_privateuseone()) return true;
    }
    if (value.isOptionalTensorList()) {
        for (const auto& entry : value.toOptionalTensorVector())
            if (entry.has_value() && entry->defined() && entry->is_privateuseone()) return true;
    }
    return false;
}

IValue returned(Call& call, const IValue& value) {
    if (value.isTensor()) return call.back(value.toTensor());
    if (value.isTensorList()) {
        std::vector<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(call.back(tensor));
        return IValue(list);
    }
    return value;
}

c10::DeviceIndex current_card() {
    return c10::impl::VirtualGuardImpl(c10::kPrivateUse1).getDevice().index();
}

void on_the_cpu(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
    const auto& schema = op.schema();
    const auto count = schema.arguments().size();
    auto arguments = torch::jit::last(stack, count);
    bool has_npu = false;
    for (const auto& value : arguments) has_npu = has_npu || any_npu(value);
    Call call;
    std::vector<IValue> replaced;
    for (size_t i = 0; i < count; ++i) {
        const IValue& value = arguments[i];
        if (value.isDevice() && value.toDevice().is_privateuseone()) {
            call.device = value.toDevice();
            replaced.emplace_back(c10::Device(c10::kCPU));
        } else {
            replaced.push_back(hosted(op, call, value, has_npu));
        }
    }
    if (call.device.index() < 0) call.device = c10::Device(c10::kPrivateUse1, current_card());
    for (size_t i = 0; i < count; ++i)
        if (is_generator(schema.arguments()[i])) {
            auto own = replaced[i].isNone() ? at::globalContext().defaultGenerator(call.device)
                                            : replaced[i].toGenerator();
            if (own.device().is_privateuseone()) replaced[i] = at::detail::createCPUGenerator(next_seed(own));
        }
    std::optional<Lent> lent;
    if (DRAWING.count(short_name(op))) lent.emplace(next_seed(at::globalContext().defaultGenerator(call.device)));
    torch::jit::drop(stack, count);
    for (auto& value : replaced) stack->push_back(std::move(value));
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    call.write_back();
    const auto results = schema.returns().size();
    auto ends = torch::jit::last(stack, results);
    std::vector<IValue> out;
    for (const auto& value : ends) out.push_back(returned(call, value));
    torch::jit::drop(stack, results);
    for (auto& value : out) stack->push_back(std::move(value));
}

// As torch composes it from other operators, which are dispatched on the NPU one by one.
void composed(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    op.getComputedKernelForDispatchKey(DispatchKey::CPU).callBoxed(op, keys, stack);
}

void composed_with_gradient(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    op.getComputedKernelForDispatchKey(DispatchKey::AutogradCPU).callBoxed(op, keys, stack);
}

struct Silent : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

int install() {
    static std::vector<std::unique_ptr<torch::Library>> libraries;  // a registration lives as long as its library
    Silent silent;  // torch warns of every kernel that is put in another's place, which is what this is for
    c10::WarningUtils::WarningHandlerGuard guard(&silent);
    auto& dispatcher = c10::Dispatcher::singleton();
    int installed = 0;
    const auto replace = [&](DispatchKey key, auto kernel_for) {
        libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
        for (const auto& name : dispatcher.getRegistrationsForDispatchKey(key)) {
            const auto op = dispatcher.findSchema(name);
            if (name.name.rfind("aten::", 0) != 0 || !op.has_value()) continue;
            if (auto kernel = kernel_for(*op)) {
                libraries.back()->impl(short_name(*op).c_str(), std::move(*kernel));
                ++installed;
            }
        }
    };
    replace(DispatchKey::PrivateUse1, [](const OperatorHandle& op) -> std::optional<torch::CppFunction> {
        const auto name = short_name(op);
        if (KEPT.count(name) || !op.hasComputedKernelForDispatchKey(DispatchKey::CPU)) return std::nullopt;
        if (name == "copy_" || op.hasKernelForDispatchKey(DispatchKey::CPU))
            return torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>();
        return torch::CppFunction::makeFromBoxedFunction<&composed>();
    });
    replace(DispatchKey::AutogradPrivateUse1, [](const OperatorHandle& op) -> std::optional<torch::CppFunction> {
        if (!op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) || KEPT.count(short_name(op)))
            return std::nullopt;
        return torch::CppFunction::makeFromBoxedFunction<&composed_with_gradient>();
    });
    return installed;
}

// The same memory as a tensor of the host, for as long as anybody holds it.
at::Tensor host(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.is_privateuseone(), "a tensor on an NPU is expected, not on ", tensor.device());
    auto* owner = new c10::Storage(tensor.storage());
    c10::Storage storage(
        c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
        c10::DataPtr(tensor.storage().mutable_data(), owner,
                     [](void* held) { delete static_cast<c10::Storage*>(held); }, c10::kCPU),
        nullptr, /*resizable=*/false);
    auto made = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return made;
}

// A copy on a card of what a kernel of the host made.
at::Tensor card(const at::Tensor& tensor, c10::Device device) {
    auto dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
    auto made = at::empty_strided(dense.sizes(), dense.strides(), dense.options().device(device));
    std::memcpy(made.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
    return made;
}

}  // namespace

TORCH_LIBRARY(npu_sim, library) {
    library.def("host(Tensor tensor) -> Tensor", &host);
    library.def("card(Tensor tensor, Device device) -> Tensor", &card);
}

// Puts CPU kernels in the place of torch_npu's; returns how many. To be called once, after torch_npu is imported.
extern "C" int npu_sim_install() { return install(); }
