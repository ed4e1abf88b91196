//! Device IDs in the kubelet's answers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_fuzz::node;
use tessera_wire::kubelet::device_id::{DeviceIds, Resource};

fuzz_target!(|input: (&str, &str)| {
    let (resource, id) = input;
    let parsed = node();
    let ids = DeviceIds::new(parsed.node.gpus(), parsed.unit);
    for resource in Resource::named(resource).into_iter().chain(Resource::ALL) {
        let _ = ids.read(resource, id);
    }
});
