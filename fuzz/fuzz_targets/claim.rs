//! Claims of dynamic resource allocation, whose spec and configuration users write.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_fuzz::node;
use tessera_wire::foreign::dra::ResourceClaim;
use tessera_wire::tessera::dra;

fuzz_target!(|json: &[u8]| {
    let Ok(claim) = serde_json::from_slice::<ResourceClaim>(json) else { return };
    let parsed = node();
    if let Ok(holds) = dra::claim_holds(&claim, &parsed.node) {
        for (gpu, _) in dra::claim_usage(&holds) {
            assert!(parsed.node.gpu(gpu).is_some());
        }
    }
    for request in &claim.spec.devices.requests {
        let exactly = request.exactly.iter().map(|exactly| &exactly.devices);
        let alternatives = request.first_available.iter().map(|alternative| &alternative.devices);
        for devices in exactly.chain(alternatives) {
            let _ = dra::gpu_request(devices);
        }
    }
    // What was parsed can be written and parsed again.
    let written = serde_json::to_string(&claim).expect("a claim can be written");
    assert_eq!(serde_json::from_str::<ResourceClaim>(&written).expect("it can be read"), claim);
});
