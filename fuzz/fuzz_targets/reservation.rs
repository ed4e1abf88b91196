//! The reservations in the annotation of a node, as an administrator or a program writes them.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_wire::tessera::reservation;

fuzz_target!(|text: &str| {
    let annotations = |text: &str| [(reservation::KEY.to_owned(), text.to_owned())].into();
    if let Ok(parsed) = reservation::parse(&annotations(text)) {
        parsed.iter().for_each(|entry| drop((entry.until_seconds(), entry.beneficiary())));
        // What was parsed can be written and parsed again.
        let printed = reservation::print(&parsed).unwrap_or_default();
        assert_eq!(reservation::parse(&annotations(&printed)).expect("it was printed"), parsed);
    }
});
