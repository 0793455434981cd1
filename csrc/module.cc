// The Python module jax_ub._cpu: what jax_ub/_cpu.pyi says, and nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "ffi/handlers.h"
#include "gemm/gemm.h"

namespace nb = nanobind;

namespace {

nb::dict Targets() {
  nb::dict targets;
  for (const jax_ub::Target& target : jax_ub::Targets()) {
    nb::dict stages;
    stages["instantiate"] = nb::capsule(target.instantiate);
    stages["execute"] = nb::capsule(target.execute);
    targets[target.name.c_str()] = stages;
  }
  return targets;
}

nb::dict CallSiteType() {
  const jax_ub::CallSiteType type = jax_ub::TheCallSiteType();
  nb::dict dict;
  dict["type_id"] = nb::capsule(type.type_id);
  dict["type_info"] = nb::capsule(type.type_info);
  return dict;
}

std::vector<std::string> Isas() {
  std::vector<std::string> names;
  for (std::string_view name : jax_ub::AvailableIsas()) names.emplace_back(name);
  return names;
}

void SetTimeout(double timeout_s) {
  if (!(timeout_s > 0)) {
    throw nb::value_error(
        ("timeout_s is " + std::to_string(timeout_s) + ", expected more than 0")
            .c_str());
  }
  jax_ub::ProcessEngine().board().set_timeout_s(timeout_s);
}

void SetNumThreads(int num_threads) {
  if (num_threads < 1) {
    throw nb::value_error(
        ("num_threads is " + std::to_string(num_threads) + ", expected at least 1")
            .c_str());
  }
  jax_ub::ProcessEngine().crew().set_num_threads(num_threads);
}

nb::dict Counters() {
  const jax_ub::Counters counters = jax_ub::ProcessEngine().counters();
  nb::dict calls;
  for (int op = 0; op < jax_ub::kNumOps; ++op) {
    const auto name = std::string(jax_ub::OpName(static_cast<jax_ub::Op>(op)));
    calls[name.c_str()] = counters.calls[op];
  }
  nb::dict dict;
  dict["calls"] = calls;
  dict["failed_gangs"] = counters.failed_gangs;
  dict["scratch_bytes"] = counters.scratch_bytes;
  return dict;
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.attr("xla_ffi_api_version") = nb::cast(jax_ub::XlaFfiApiVersion());
  m.def("targets", &Targets);
  m.def("call_site_type", &CallSiteType);
  m.def("isa", [] { return std::string(jax_ub::CurrentIsa()); });
  m.def("isas", &Isas);
  m.def(
      "set_isa", [](const std::string& name) { jax_ub::SetIsa(name); },
      nb::arg("name"));
  m.def("set_timeout_s", &SetTimeout, nb::arg("timeout_s"));
  m.def("set_num_threads", &SetNumThreads, nb::arg("num_threads"));
  m.def("num_threads", [] { return jax_ub::ProcessEngine().crew().num_threads(); });
  m.def("counters", &Counters);
}
