//! Pods and nodes as the API server sends them, with everything that users write into them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_fuzz::node;
use tessera_wire::foreign::dialect::MemoryUnit;
use tessera_wire::foreign::objects::{Node, Pod};
use tessera_wire::tessera::{grant, parsed_node, preferences};

fuzz_target!(|json: &[u8]| {
    if let Ok(pod) = serde_json::from_slice::<Pod>(json) {
        let parsed = node();
        let _ = pod.spec.request(parsed.unit);
        let _ = pod.spec.claims(parsed.unit);
        let _ = pod.spec.host_needs();
        let _ = preferences::parse(&pod.metadata.annotations);
        let _ = grant::complete(&pod.spec, &pod.metadata.annotations, &parsed.node, parsed.unit);
    }
    if let Ok(node) = serde_json::from_slice::<Node>(json) {
        let _ = parsed_node::parse(&node, MemoryUnit::GiB);
    }
});
