// A simulated accelerator "sim" with two devices, for machines without a GPU (torch's PrivateUse1).
//
// A block of its memory is the host's, so every operator runs the CPU's kernel on an alias of its
// tensors: results are the CPU's, bit for bit, and nothing is copied. What a GPU refuses is refused:
// tensors of two devices in one operator, a CPU generator for a tensor of the device, a forked
// process that inherits a device in use and, on request (as MPS), float64. What makes the host wait
// for a GPU is told to a hook in Python: copies, .item() and operators whose result has a size that
// the host must know. Nothing is asynchronous.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/extension.h>

#include <atomic>
#include <set>

using namespace at;

namespace {

constexpr auto SIM = DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
thread_local int current = 0;
std::atomic<bool> in_use{false}, bad_fork{false}, no_double{false};
std::atomic<int64_t> allocated[DEVICES];
PyObject* hook = nullptr;  // hook(kind, bytes); touched with the GIL held

void use() {  // as CUDA: a fork after the first use leaves the child without the device
  if (!in_use.exchange(true)) pthread_atfork(nullptr, nullptr, [] { bad_fork = true; });
  TORCH_CHECK(!bad_fork, "Cannot re-initialize sim in forked subprocess");
}

void tell(const std::string& kind, int64_t bytes) {
  py::gil_scoped_acquire gil;  // a backward pass comes from a thread of autograd's
  if (hook) py::reinterpret_borrow<py::object>(hook)(kind, bytes);
}

bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == SIM; }

void check_type(ScalarType type) {
  TORCH_CHECK_TYPE(!(no_double && type == kDouble),
                   "Cannot convert a sim Tensor to float64 dtype as the device doesn't support it");
}

void check_device(Device d) { TORCH_CHECK(d.index() < DEVICES, "no such device: ", d); }

// -- memory ---------------------------------------------------------------------------------------

// A block of a device: memory of its own, or the storage that a CPU kernel has made for a result.
struct Block {
  void* own;
  Storage lent;
  int64_t bytes;
  int device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated[block->device] -= block->bytes;
  free(block->own);
  delete block;
}

DataPtr block_of(void* data, void* own, Storage lent, int64_t bytes, int device) {
  use();
  allocated[device] += bytes;
  auto* block = new Block{own, std::move(lent), bytes, device};
  return {data, block, &release, Device(SIM, device)};
}

struct SimAllocator final : c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    void* data = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return block_of(data, data, Storage(), bytes, current);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    memcpy(to, from, bytes);
  }
} sim_allocator;
REGISTER_ALLOCATOR(SIM, &sim_allocator);

DataPtr lend(const Storage& storage, int device) {
  return block_of(storage.mutable_data(), nullptr, storage, storage.nbytes(), device);
}

// -- the current device ---------------------------------------------------------------------------

struct OnDevice {  // for as long as it lives
  int before = current;
  explicit OnDevice(std::optional<Device> d) {
    if (!d) return;
    check_device(*d);
    if (d->has_index()) current = d->index();
  }
  ~OnDevice() { current = before; }
};

// Streams and events do nothing, because nothing is asynchronous.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return SIM; }
  Device getDevice() const override { return Device(SIM, current); }
  void setDevice(Device d) const override {
    check_device(d);
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index()) current = d.index();
  }
  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    setDevice(d);
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  c10::Stream getStream(Device d) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, d);
  }
  c10::Stream getDefaultStream(Device d) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  void record(void** event, const c10::Stream&, const DeviceIndex,
              const c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- random numbers -------------------------------------------------------------------------------

// A device's generator is one of its own: it draws what the CPU's would from the same seed, so that
// results can be compared, but numbers drawn on the host do not advance it.
struct SimGenerator final : c10::GeneratorImpl {
  Generator cpu;
  SimGenerator(int device, Generator cpu)
      : GeneratorImpl(Device(SIM, device), DispatchKeySet(DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "sim's generators have no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "sim's generators have no offset"); }
  void set_state(const c10::TensorImpl& s) override { cpu.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.unsafeGetGeneratorImpl()->get_state();
  }
  SimGenerator* clone_impl() const override {
    return new SimGenerator(device_.index(), cpu.clone());
  }
};

Generator new_generator(int device) {
  return make_generator<SimGenerator>(device, at::detail::createCPUGenerator());
}

const Generator& default_generator(int device) {
  static Generator all[DEVICES] = {new_generator(0), new_generator(1)};
  return all[device < 0 ? current : device];
}

// Lets CPU kernels, which draw from the host's generator by default, draw from a device's.
struct DrawOnDevice {
  Generator host = at::detail::getDefaultCPUGenerator(), device;
  Tensor before = host.get_state();
  explicit DrawOnDevice(int number) : device(default_generator(number)) {
    host.set_state(device.get_state());
  }
  ~DrawOnDevice() {
    device.set_state(host.get_state());
    host.set_state(before);
  }
};

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return in_use; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex d) const override { Guard().setDevice(Device(SIM, d)); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    DeviceIndex before = current;
    if (d >= 0) setCurrentDevice(d);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  Device getDeviceFromPtr(void*) const override { return Device(SIM, current); }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(kCPU); }
  Generator getNewGenerator(DeviceIndex d) const override {
    return new_generator(d < 0 ? current : d);
  }
  const Generator& getDefaultGenerator(DeviceIndex d) const override {
    return default_generator(d);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    OnDevice on(storage.device());
    auto data = sim_allocator.allocate(bytes);
    if (auto kept = std::min(bytes, storage.nbytes())) memcpy(data.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// -- the same memory, seen from the host and from the device --------------------------------------

Tensor tensor_on(Storage storage, DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key),
                                                  like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                    like.storage_offset());
  return made;
}

Storage storage_of(size_t bytes, DataPtr data, c10::Allocator* allocator) {
  return Storage(c10::make_intrusive<StorageImpl>(StorageImpl::use_byte_size_t(), bytes,
                                                  std::move(data), allocator, true));
}

Tensor host_view(const Tensor& t) {
  if (!is_sim(t)) return t;
  const Storage& storage = t.storage();
  DataPtr data(storage.mutable_data(), new Storage(storage),
               [](void* kept) { delete static_cast<Storage*>(kept); }, Device(kCPU));
  auto* allocator = c10::GetAllocator(kCPU);
  Storage seen = storage_of(storage.nbytes(), std::move(data), allocator);
  auto view = tensor_on(std::move(seen), DispatchKey::CPU, t);
  if (t.unsafeGetTensorImpl()->is_wrapped_number())
    view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

Tensor device_result(const Tensor& result, int device) {  // of a CPU kernel, newly made by it
  if (!result.defined()) return result;
  check_type(result.scalar_type());
  const Storage& storage = result.storage();
  Storage own = storage_of(storage.nbytes(), lend(storage, device), &sim_allocator);
  return tensor_on(std::move(own), DispatchKey::PrivateUse1, result);
}

// -- every operator -------------------------------------------------------------------------------

// Those whose result has a size or is a number that the host waits for on CUDA.
const std::set<std::string> WAITS = {
    "aten::nonzero",       "aten::bincount", "aten::_unique2",          "aten::unique_dim",
    "aten::masked_select", "aten::equal",    "aten::repeat_interleave", "aten::unique_consecutive",
    "aten::histc"};
const std::set<std::string> INDEXING = {"aten::index", "aten::index_put", "aten::index_put_",
                                        "aten::_index_put_impl_"};

// The tensors of one call, each with what the CPU's kernel sees of it.
struct Call {
  const c10::OperatorHandle& op;
  int device = -1;
  bool of_host = false;  // whether a tensor of the host takes part that is more than a number
  std::vector<std::pair<Tensor, Tensor>> pairs;  // on the device, seen from the host

  std::string name() { return c10::toString(op.operator_name()); }

  void on(Device d) {
    TORCH_CHECK(device < 0 || device == d.index(),
                "Expected all tensors to be on the same device, but found at least two devices, ",
                "sim:", device, " and ", d, "! (", name(), ")");
    device = d.index();
  }

  void look(const Tensor& t, bool written) {
    if (is_sim(t)) on(t.device());
    else if (t.defined() && (t.dim() > 0 || written)) of_host = true;
  }

  // Of an index, which CUDA copies if it is on the host. (aten::index has told that by the copy.)
  void look_at_index(const Tensor& t) {
    const bool put = op.schema().name() != "aten::index";
    const bool mask = t.scalar_type() == kBool || t.scalar_type() == kByte;
    if (is_sim(t)) on(t.device());
    if (put && !is_sim(t)) tell("h2d", t.nbytes());
    if (put && mask) tell("wait nonzero", 0);
  }

  void look(const IValue& v, bool written, bool indices) {
    if (v.isTensor()) {
      look(v.toTensor(), written);
    } else if (v.isTensorList()) {
      for (const Tensor& t : v.toTensorVector()) look(t, written);
    } else if (v.isOptionalTensorList()) {
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
        if (t && t->defined()) indices ? look_at_index(*t) : look(*t, written);
    } else if (v.isDevice() && v.toDevice().type() == SIM) {
      on(v.toDevice().has_index() ? v.toDevice() : Device(SIM, current));
    } else if (v.isGenerator()) {
      auto found = v.toGenerator().device();
      TORCH_CHECK(found.type() == SIM, "Expected a 'sim' device type for generator but found '",
                  found, "' (", name(), ")");
    }
  }

  Tensor in(const Tensor& t) {
    if (!is_sim(t)) return t;
    for (auto& [on_device, on_host] : pairs)
      if (on_device.is_same(t)) return on_host;
    pairs.emplace_back(t, host_view(t));
    return pairs.back().second;
  }

  void in(IValue& v) {
    if (v.isTensor()) {
      v = in(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(in(t));
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(in(*t)) : t);
      v = list;
    } else if (v.isDevice()) {
      v = Device(kCPU);
    } else if (v.isGenerator()) {
      v = static_cast<SimGenerator*>(v.toGenerator().unsafeGetGeneratorImpl())->cpu;
    }
  }

  Tensor out(const Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [on_device, on_host] : pairs) {
      if (on_host.is_same(result)) return on_device;
      if (!on_host.storage().is_alias_of(result.storage())) continue;
      auto view = at::detail::make_tensor<TensorImpl>(
          TensorImpl::VIEW, Storage(on_device.storage()), on_device.key_set(), result.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(),
                                                        result.storage_offset());
      return view;
    }
    return device_result(result, device);
  }

  void out(IValue& v) {
    if (v.isTensor()) {
      v = out(v.toTensor());
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(out(t));
      v = list;
    }
  }

  void take_over_sizes() {  // of arguments that the kernel has resized
    for (auto& [on_device, on_host] : pairs) {
      const Storage &theirs = on_host.storage(), &ours = on_device.storage();
      if (theirs.data() != ours.data() || theirs.nbytes() != ours.nbytes()) {
        auto* storage = ours.unsafeGetStorageImpl();
        storage->set_data_ptr_noswap(lend(theirs, on_device.device().index()));
        storage->set_nbytes(theirs.nbytes());
      }
      if (on_host.sizes() != on_device.sizes() || on_host.strides() != on_device.strides() ||
          on_host.storage_offset() != on_device.storage_offset())
        on_device.unsafeGetTensorImpl()->set_sizes_and_strides(
            on_host.sizes(), on_host.strides(), on_host.storage_offset());
    }
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto begin = stack->size() - schema.arguments().size();
  const auto indices = INDEXING.count(schema.name()) > 0;
  Call call{op};
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    call.look((*stack)[begin + i], alias && alias->isWrite(), indices);
  }
  TORCH_CHECK(!call.of_host,
              "Expected all tensors to be on the same device, but found at least two devices, sim:",
              call.device, " and cpu! (", call.name(), ")");
  for (size_t i = begin; i < stack->size(); i++) call.in((*stack)[i]);
  if (WAITS.count(schema.name())) tell("wait " + schema.name().substr(6), 0);
  {
    std::optional<DrawOnDevice> drawing;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) drawing.emplace(call.device);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  call.take_over_sizes();
  const auto first = stack->size() - schema.returns().size();
  for (size_t i = first; i < stack->size(); i++) call.out((*stack)[i]);
}

// -- those that cannot be boxed -------------------------------------------------------------------

Tensor empty(IntArrayRef size, std::optional<ScalarType> type, std::optional<Layout>,
             std::optional<Device> device, std::optional<bool>,
             std::optional<MemoryFormat> format) {
  check_type(dtype_or_default(type));
  OnDevice on(device);
  return at::detail::empty_generic(size, &sim_allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                   dtype_or_default(type), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> type,
                     std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  check_type(dtype_or_default(type));
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &sim_allocator,
                                           DispatchKeySet(DispatchKey::PrivateUse1),
                                           dtype_or_default(type));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (from.device() != to.device()) {
    std::string kind = is_sim(from) && is_sim(to) ? "peer" : is_sim(from) ? "d2h" : "h2d";
    tell(kind + (non_blocking ? " non_blocking" : ""), from.nbytes());
  }
  host_view(to).copy_(host_view(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Scalar item(const Tensor& t) {
  tell("item", t.nbytes());
  return host_view(t).item();
}

Tensor& set_storage(Tensor& t, Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset.expect_int());
  }
  return t;
}

Tensor& set_source(Tensor& t, Storage storage) {
  int64_t size = storage.nbytes() / t.element_size();
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_contiguous({size});
  return t;
}

void check_same(const char* op, std::initializer_list<Tensor> tensors) {
  const Device device = tensors.begin()->device();
  for (const Tensor& t : tensors)
    TORCH_CHECK(!t.defined() || t.device() == device,
                "Expected all tensors to be on the same device, but found at least two devices, ",
                device, " and ", t.device(), "! (", op, ")");
}

// Autograd knows convolutions of other backends by these two names only.
Tensor convolution(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                   c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                   c10::SymIntArrayRef dilation, bool transposed,
                   c10::SymIntArrayRef output_padding, c10::SymInt groups) {
  check_same("convolution", {x, weight, bias ? *bias : Tensor()});
  std::optional<Tensor> shift;
  if (bias && bias->defined()) shift = host_view(*bias);
  auto y = at::convolution_symint(host_view(x), host_view(weight), shift, stride, padding, dilation,
                                  transposed, output_padding, groups);
  return device_result(y, x.device().index());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
    c10::SymIntArrayRef output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  check_same("convolution_backward", {x, weight, grad});
  c10::SymInt channels(transposed ? weight.size(1) * groups.expect_int() : weight.size(0));
  auto [to_x, to_weight, to_bias] = at::convolution_backward_symint(
      host_view(grad), host_view(x), host_view(weight), c10::SymIntArrayRef(&channels, 1), stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  auto device = x.device().index();
  return {device_result(to_x, device), device_result(to_weight, device),
          device_result(to_bias, device)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  // torch would compute these of other operators, with other rounding than the CPU's kernels
  for (auto op : {"native_group_norm", "native_group_norm_backward", "native_layer_norm",
                  "native_layer_norm_backward"})
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// -- autocast, with CUDA's lists ------------------------------------------------------------------

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define F32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SUM(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  LOW(_convolution) LOW(conv1d) LOW(conv2d) LOW(convolution) LOW(addmm) LOW(matmul) LOW(einsum)
  LOW(mm) LOW(linear) LOW(baddbmm) LOW(bmm) LOW(scaled_dot_product_attention)
  F32(exp) F32(log) F32(log1p) F32(reciprocal) F32(rsqrt) F32(pow, Tensor_Scalar) F32(softplus)
  F32(layer_norm) F32(native_layer_norm) F32(group_norm) F32(cosine_similarity) F32(nll_loss)
  F32(kl_div) F32(l1_loss) F32(mse_loss) F32(dist) F32(cdist) F32(logsumexp)
  SUM(softmax, int) SUM(log_softmax, int) SUM(cumsum) SUM(sum) SUM(sum, dim_IntList) SUM(prod)
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("current", [] { return current; });
  m.def("set_current", [](int d) { Guard().setDevice(Device(SIM, d)); });
  m.def("in_use", [] { return in_use.load(); });
  m.def("bad_fork", [] { return bad_fork.load(); });
  m.def("allocated", [](int d) { return allocated[d].load(); });
  m.def("refuse_double", [](bool on) { no_double = on; });
  m.def("default_generator", [](int d) { return default_generator(d); });
  m.def("set_hook", [](py::object h) {
    Py_XDECREF(hook);
    hook = h.is_none() ? nullptr : h.release().ptr();
  });
}
