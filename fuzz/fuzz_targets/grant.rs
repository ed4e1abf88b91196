//! The grant annotations of a pod: ours, and those of every dialect.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_fuzz::{node, pod};
use tessera_wire::tessera::grant;

fuzz_target!(|input: (&str, Vec<(&str, &str)>)| {
    let (ours, others) = input;
    let (pod, parsed) = (pod(), node());
    let mut annotations: grant::Annotations =
        others.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let _ = grant::complete(&pod.spec, &annotations, &parsed.node, parsed.unit);
    annotations.insert(grant::KEY.to_owned(), ours.to_owned());
    if let Ok(Some(grants)) = grant::parse(&pod.spec, &annotations, &parsed.node, parsed.unit) {
        // What was parsed can be written and parsed again.
        let printed = grant::print(&grants, &parsed.node);
        let again = [(grant::KEY.to_owned(), printed)].into();
        assert!(grant::parse(&pod.spec, &again, &parsed.node, parsed.unit).is_ok());
    }
});
