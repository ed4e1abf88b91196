//! Lines of `/proc/PID/cgroup`: a tenant may create cgroups with names of its own below its container's.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_wire::foreign::cgroup;

fuzz_target!(|text: &str| {
    let _ = cgroup::owner(text);
});
