//! Profiles of this test itself.

use std::{
    hint::black_box,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

use tessera_profile::record;

#[inline(never)]
fn work(until: &AtomicBool) -> u64 {
    let mut sum = 0u64;
    while !until.load(Ordering::Relaxed) {
        for number in 0..10_000 {
            sum = black_box(sum.wrapping_mul(31).wrapping_add(number));
        }
    }
    sum
}

/// The thread uses the processor until a profile has samples, so the test does not depend on the machine.
#[test]
fn stacks_of_a_busy_thread_lead_to_its_function() {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| black_box(work(&done)));
        let profile = loop {
            let profile = record(Duration::from_millis(200)).unwrap();
            if !profile.stacks.is_empty() {
                break profile;
            }
        };
        done.store(true, Ordering::Relaxed);
        let own = std::env::current_exe().unwrap();
        assert_eq!(profile.mappings[0].file, own.display().to_string(), "the program comes first");
        let start = work as fn(&AtomicBool) -> u64 as usize as u64;
        let is_in_work = |address: &u64| (start..start + 4096).contains(address);
        let deep = profile.stacks.iter().filter(|stack| stack.iter().any(is_in_work) && stack.len() > 3);
        assert!(
            deep.count() > 0,
            "no stack leads from the thread's start to the function: {:x?}",
            profile.stacks
        );
        assert!(!profile.print().unwrap().is_empty());
    });
}
