//! Bodies of kube-scheduler's extender calls.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_wire::foreign::extender::{BindingArgs, ExtenderArgs, PreemptionArgs};

fuzz_target!(|body: &[u8]| {
    if let Ok(args) = serde_json::from_slice::<ExtenderArgs>(body) {
        let _ = args.names().count();
    }
    let _ = serde_json::from_slice::<BindingArgs>(body);
    if let Ok(args) = serde_json::from_slice::<PreemptionArgs>(body) {
        let _ = args.proposals().count();
    }
});
