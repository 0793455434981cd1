// The Python module jax_ub._cpu. jax_ub/_cpu.pyi documents it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <string_view>
#include <vector>

#include "engine/cpu/core_affinity.h"
#include "engine/cpu/peak.h"
#include "ffi/attributes.h"
#include "ffi/handlers.h"
#include "gemm/gemm.h"
#include "module_bindings.h"
#include "platform/cgroup.h"
#include "platform/deadline.h"
#include "platform/error.h"
#include "schedule/checker.h"
#include "schedule/schedule.h"

namespace nb = nanobind;

namespace {

std::vector<std::string> Isas() {
  std::vector<std::string> names;
  for (std::string_view name : jax_ub::AvailableIsas()) names.emplace_back(name);
  return names;
}

void SetTimeout(double timeout_s) {
  jax_ub::ProcessEngine().rendezvous().set_timeout_s(jax_ub::CheckedTimeout(timeout_s));
}

void SetFirstCallTimeout(double timeout_s) {
  jax_ub::ProcessEngine().rendezvous().set_first_call_timeout_s(
      jax_ub::CheckedTimeout(timeout_s));
}

int DefaultNumThreads() {
  return jax_ub::DefaultNumThreads(jax_ub::NumAllowedCores(), jax_ub::CpuQuota());
}

void SetNumThreads(int num_threads, const std::vector<int>& cores) {
  if (num_threads < 1) {
    throw nb::value_error(
        ("num_threads is " + std::to_string(num_threads) + ", expected at least 1")
            .c_str());
  }
  for (int core : cores) {
    if (core >= 0 && core < CPU_SETSIZE) continue;
    throw nb::value_error(("there is no core " + std::to_string(core)).c_str());
  }
  jax_ub::ProcessEngine().pool().set_num_threads(num_threads, cores);
}

nb::dict Counters() {
  const jax_ub::Engine* engine = jax_ub::ExistingEngine();
  const jax_ub::Counters counters = engine ? engine->counters() : jax_ub::Counters();
  nb::dict dict;
  dict["calls"] = jax_ub::CallsByName(counters.calls);
  dict["failed_calls"] = counters.failed_calls;
  dict["scratch_bytes"] = counters.scratch_bytes;
  dict["slot_bytes"] = counters.slot_bytes;
  dict["peak_slot_bytes"] = counters.peak_slot_bytes;
  return dict;
}

// Returns the properties of each op (attributes, collective, has_gemm), keyed by its
// name. A test compares them with those of the JAX primitives.
nb::dict Ops() {
  nb::dict ops;
  for (const jax_ub::OpInfo& info : jax_ub::kOps) {
    std::vector<std::string> attributes;
    for (std::string_view name : jax_ub::AttributeNames(info))
      attributes.emplace_back(name);
    nb::dict op;
    op["attributes"] = attributes;
    op["collective"] = info.communicated == jax_ub::Communicated::kNothing
                           ? std::string()
                           : std::string(jax_ub::CollectiveKindName(info.collective));
    op["has_gemm"] = info.gemm != jax_ub::GemmKind::kNone;
    ops[std::string(info.name).c_str()] = op;
  }
  return ops;
}

// Returns the table of dtypes, keyed by name. A test compares it with NumPy's dtypes.
nb::dict DTypes() {
  nb::dict dtypes;
  for (const jax_ub::DTypeInfo& info : jax_ub::kDTypes) {
    nb::dict dtype;
    dtype["numpy"] = info.numpy_name;
    dtype["size_bytes"] = info.size_bytes;
    dtype["is_operand"] = info.is_operand;
    dtype["is_result"] = info.is_result;
    dtypes[info.name] = dtype;
  }
  return dtypes;
}

void StartTrace(int64_t events_per_thread) {
  if (events_per_thread < 1) {
    throw nb::value_error(("events_per_thread is " + std::to_string(events_per_thread) +
                           ", expected at least 1")
                              .c_str());
  }
  jax_ub::ProcessEngine().tracer().Start(events_per_thread);
}

nb::tuple SpanOf(const jax_ub::TraceEvent& event) {
  const std::string_view kind = jax_ub::TraceKindName(event.kind);
  const std::string_view payload = jax_ub::PayloadName(event.payload);
  return nb::make_tuple(event.begin_ns, event.end_ns, event.call,
                        nb::str(kind.data(), kind.size()), event.rank, event.chunk,
                        event.split, event.peer,
                        nb::str(payload.data(), payload.size()));
}

nb::dict ReadTrace() {
  jax_ub::Engine* engine = jax_ub::ExistingEngine();
  const jax_ub::Trace trace = engine ? engine->tracer().Read() : jax_ub::Trace();
  nb::list calls;
  for (const jax_ub::TraceCall& call : trace.calls) {
    nb::dict dict;
    dict["label"] = call.label;
    dict["op"] = std::string(jax_ub::OpName(call.op));
    dict["method"] = std::string(jax_ub::MethodName(call.method));
    dict["variant"] = std::string(jax_ub::VariantName(call.variant));
    dict["num_ranks"] = call.num_ranks;
    dict["num_splits"] = call.num_splits;
    dict["devices"] = call.devices;
    dict["operands"] = call.operands;
    calls.append(dict);
  }
  nb::list threads;
  int64_t num_dropped = trace.num_dropped_calls;
  for (const jax_ub::TraceThread& thread : trace.threads) {
    nb::list spans;
    for (const jax_ub::TraceEvent& event : thread.events) spans.append(SpanOf(event));
    threads.append(spans);
    num_dropped += thread.num_dropped;
  }
  nb::dict dict;
  dict["calls"] = calls;
  dict["threads"] = threads;
  dict["num_dropped"] = num_dropped;
  return dict;
}

// Returns the enumerator whose name(value) is `wanted`. The enumerators are 0 to count
// - 1. If no name matches, throws ValueError, which lists the names.
template <typename Enum>
Enum Named(const char* what,
           const std::string& wanted,
           int count,
           std::string_view (*name)(Enum)) {
  std::string known;
  for (int i = 0; i < count; ++i) {
    const auto value = static_cast<Enum>(i);
    if (name(value) == wanted) return value;
    known += (i == 0 ? "" : ", ") + std::string(name(value));
  }
  throw nb::value_error(
      (std::string(what) + " '" + wanted + "' is none of " + known).c_str());
}

double PeakGflops(const std::string& dtype, double duration_s) {
  const jax_ub::DType named =
      Named("dtype", dtype, jax_ub::kNumDTypes, &jax_ub::DTypeName);
  const nb::gil_scoped_release released;
  return jax_ub::MeasurePeak(jax_ub::ProcessEngine().pool(), named, duration_s) / 1e9;
}

// Returns the collective whose schedule an op follows. The collective of a bulk op runs
// concurrently with the op's GEMMs.
jax_ub::CollectiveKind CollectiveNamed(const std::string& op) {
  if (op == "bulk_all_gather") return jax_ub::CollectiveKind::kAllGather;
  if (op == "bulk_reduce_scatter") return jax_ub::CollectiveKind::kReduceScatter;
  return Named("op", op, jax_ub::kNumCollectiveKinds, &jax_ub::CollectiveKindName);
}

jax_ub::Method MethodNamed(const std::string& method) {
  return Named("method", method, jax_ub::kNumMethods, &jax_ub::MethodName);
}

jax_ub::Variant VariantNamed(const std::string& variant) {
  return Named("variant", variant, jax_ub::kNumVariants, &jax_ub::VariantName);
}

std::vector<jax_ub::Step> ScheduleOf(const std::string& op,
                                     const std::string& method,
                                     int rank,
                                     int num_ranks,
                                     int num_splits,
                                     const std::string& variant) {
  return jax_ub::MakeSchedule(CollectiveNamed(op), MethodNamed(method), rank, num_ranks,
                              num_splits, VariantNamed(variant))
      .steps;
}

std::vector<std::string> CheckSchedule(const std::string& op,
                                       const std::string& method,
                                       int num_ranks,
                                       int num_splits,
                                       const std::string& variant) {
  return jax_ub::CheckSchedule(CollectiveNamed(op), MethodNamed(method), num_ranks,
                               num_splits, VariantNamed(variant));
}

// An endpoint in Python. It has the socket at which a process accepts its peers.
// `endpoint` is null after `connect` has taken it.
struct Endpoint {
  std::unique_ptr<jax_ub::Endpoint> endpoint = std::make_unique<jax_ub::Endpoint>();
  jax_ub::PeerAddress address = endpoint->address();
};

class Communicator {
 public:
  explicit Communicator(std::shared_ptr<jax_ub::CallSequencer> sequencer)
      : sequencer_(std::move(sequencer)) {}
  ~Communicator() {
    // The GIL is released, because Close waits for the thread that receives messages.
    const nb::gil_scoped_release released;
    Close();
  }

  // Unregisters the call sequencer from the engine and closes it. In a forked child,
  // there is no engine, so the sequencer is only closed.
  void Close() {
    if (jax_ub::Engine* engine = jax_ub::ExistingEngine()) {
      engine->Leave(sequencer_);
    } else {
      sequencer_->Close();
    }
  }
  std::string name() const { return sequencer_->communicator().name(); }
  int64_t size_bytes() const { return sequencer_->communicator().size_bytes(); }
  int64_t calls() const { return sequencer_->num_calls(); }
  double BarrierSeconds(int count) { return sequencer_->BarrierSeconds(count); }
  std::optional<std::string> failure() const {
    const std::exception_ptr failure = sequencer_->failure();
    if (!failure) return std::nullopt;
    return jax_ub::TextOf(failure);
  }

 private:
  const std::shared_ptr<jax_ub::CallSequencer> sequencer_;
};

std::unique_ptr<Communicator> Connect(Endpoint& endpoint,
                                      const std::string& name,
                                      const std::vector<int64_t>& devices,
                                      const std::vector<int>& processes,
                                      int process,
                                      const std::map<int, std::string>& addresses,
                                      const std::map<int, uint64_t>& tokens,
                                      int64_t buffer_bytes,
                                      double timeout_s,
                                      int generation) {
  if (!endpoint.endpoint) throw nb::value_error("the endpoint was used already");
  jax_ub::CheckOneOfEach(devices.size(), processes.size(), "processes");
  const auto peers = jax_ub::PeersOf(addresses, tokens);
  const nb::gil_scoped_release released;
  const auto communicator = jax_ub::SharedMemoryCommunicator::Connect(
      std::move(endpoint.endpoint), {processes, process, name}, peers, buffer_bytes,
      timeout_s);
  return std::make_unique<Communicator>(
      jax_ub::ProcessEngine().Join(communicator, devices, generation));
}

std::string Describe(const jax_ub::Step& step) {
  return "Step(kind='" + std::string(StepKindName(step.kind)) + "', payload='" +
         std::string(PayloadName(step.payload)) +
         "', chunk=" + std::to_string(step.chunk) +
         ", split=" + std::to_string(step.split) +
         ", peer=" + std::to_string(step.peer) + ", slot=" + std::to_string(step.slot) +
         ", num_chunks=" + std::to_string(step.num_chunks) + ")";
}

}  // namespace

NB_MODULE(_cpu, m) {
  // Disables nanobind's warnings about leaks, because modules may still refer to
  // communicators when Python exits.
  nb::set_leak_warnings(false);
  m.attr("default_splits") = jax_ub::kDefaultSplits;
  m.attr("default_timeout_s") = jax_ub::kDefaultTimeoutS;
  m.attr("xla_ffi_api_version") = nb::cast(jax_ub::XlaFfiApiVersion());
  m.def("targets", [] { return jax_ub::HandlersOf(jax_ub::Targets()); });
  m.def("quantize_targets",
        [] { return jax_ub::HandlersOf(jax_ub::QuantizeTargets()); });
  m.def("ops", &Ops);
  m.def("dtypes", &DTypes);
  m.def("call_site_type", [] { return jax_ub::TypeOf(jax_ub::TheCallSiteType()); });
  m.def("isa", [] { return std::string(jax_ub::CurrentIsa()); });
  m.def("isas", &Isas);
  m.def(
      "set_isa", [](const std::string& name) { jax_ub::SetIsa(name); },
      nb::arg("name"));
  m.def("set_timeout_s", &SetTimeout, nb::arg("timeout_s"));
  m.def("set_first_call_timeout_s", &SetFirstCallTimeout, nb::arg("timeout_s"));
  m.def("set_num_threads", &SetNumThreads, nb::arg("num_threads"),
        nb::arg("cores") = std::vector<int>());
  m.def("has_engine", [] { return jax_ub::ExistingEngine() != nullptr; });
  m.def("cpu_set", [] {
    jax_ub::Engine* engine = jax_ub::ExistingEngine();
    return engine ? engine->pool().cpu_set() : std::vector<int>();
  });
  m.def("num_threads", [] {
    jax_ub::Engine* engine = jax_ub::ExistingEngine();
    return engine ? engine->pool().num_threads() : DefaultNumThreads();
  });
  m.def("default_num_threads", &DefaultNumThreads);
  m.def("peak_gflops", &PeakGflops, nb::arg("dtype"), nb::arg("duration_s"));
  m.def("counters", &Counters);
  m.def("release_slots", [] {
    if (jax_ub::Engine* engine = jax_ub::ExistingEngine()) engine->ReleaseSlots();
  });

  m.def(
      "set_local_devices",
      [](std::vector<int64_t> devices) {
        jax_ub::ProcessEngine().rendezvous().set_local_devices(std::move(devices));
      },
      nb::arg("devices"));
  m.def(
      "begin_program",
      [](const std::string& channel) {
        jax_ub::ProcessEngine().rendezvous().BeginProgram(channel);
      },
      nb::arg("channel"));
  nb::class_<Endpoint>(m, "Endpoint")
      .def_prop_ro("address", [](const Endpoint& self) { return self.address.address; })
      .def_prop_ro("token", [](const Endpoint& self) { return self.address.token; });
  const auto unlocked = nb::call_guard<nb::gil_scoped_release>();
  nb::class_<Communicator>(m, "Communicator")
      .def_prop_ro("name", &Communicator::name)
      .def_prop_ro("size_bytes", &Communicator::size_bytes)
      .def_prop_ro("failure", &Communicator::failure)
      .def_prop_ro("calls", &Communicator::calls)
      .def("barrier_seconds", &Communicator::BarrierSeconds, nb::arg("count"), unlocked)
      .def("close", &Communicator::Close, unlocked);
  m.def("endpoint", [] { return std::make_unique<Endpoint>(); });
  m.def("connect", &Connect, nb::arg("endpoint"), nb::kw_only(), nb::arg("name"),
        nb::arg("devices"), nb::arg("processes"), nb::arg("process"),
        nb::arg("addresses"), nb::arg("tokens"), nb::arg("buffer_bytes"),
        nb::arg("timeout_s"), nb::arg("generation") = 1);

  m.def("start_trace", &StartTrace, nb::arg("events_per_thread") = 1 << 16);
  m.def("stop_trace", [] {
    if (jax_ub::Engine* engine = jax_ub::ExistingEngine()) engine->tracer().Stop();
  });
  m.def("read_trace", &ReadTrace);

  nb::class_<jax_ub::Step>(m, "Step")
      .def_prop_ro(
          "kind",
          [](const jax_ub::Step& step) { return std::string(StepKindName(step.kind)); })
      .def_prop_ro("payload",
                   [](const jax_ub::Step& step) {
                     return std::string(PayloadName(step.payload));
                   })
      .def_ro("chunk", &jax_ub::Step::chunk)
      .def_ro("split", &jax_ub::Step::split)
      .def_ro("peer", &jax_ub::Step::peer)
      .def_ro("slot", &jax_ub::Step::slot)
      .def_ro("num_chunks", &jax_ub::Step::num_chunks)
      .def("__repr__", &Describe);
  m.def("schedule", &ScheduleOf, nb::arg("op"), nb::arg("method"), nb::arg("rank"),
        nb::arg("num_ranks"), nb::arg("num_splits"), nb::arg("variant") = "plain");
  m.def("check_schedule", &CheckSchedule, nb::arg("op"), nb::arg("method"),
        nb::arg("num_ranks"), nb::arg("num_splits"), nb::arg("variant") = "plain");
}
