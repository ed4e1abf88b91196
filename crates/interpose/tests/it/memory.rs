//! Memory limits, for every way to allocate memory.

use tessera_limits::{GpuLimit, files};

use crate::support::{CONTEXT, Container, ManualArbiter, Tenant, until};

const LIMIT: u64 = 4096;

/// Returns how many allocations of 64 MiB fit beside one context.
const PIECES: u64 = (LIMIT - CONTEXT) / 64;

#[test]
fn every_allocation_and_entry_point_stops_at_the_limit() {
    for door in ["link", "dlsym", "proc", "default", "next"] {
        for way in ["plain", "managed", "pitch", "array", "vmm", "async"] {
            let container = Container::with_memory(LIMIT);
            let mut tenant = container.begun(door);
            // The first managed allocation is charged 64 MiB more.
            let pieces = PIECES - u64::from(way == "managed");
            assert_eq!(tenant.ask(&format!("fill {way} 64")), format!("{pieces} 2"), "{door} {way}");
            assert!(container.most() <= LIMIT, "{door} {way}: {} taken", container.most());
            assert_eq!(tenant.end(), "");
        }
    }
}

/// A container with several claims has a directory with a grant for each.
#[test]
fn each_gpu_is_limited_by_the_grant_of_its_claim() {
    let container = Container::with_claims(LIMIT);
    let mut tenant = container.begun("dlsym");
    assert_eq!(tenant.ask("fill plain 64"), format!("{PIECES} 2"));
    assert_eq!(
        (container.charged_to_claim("a"), container.charged_to_claim("b")),
        (0, CONTEXT + PIECES * 64)
    );
    assert_eq!(tenant.ask("free plain"), "0");
    assert_eq!(container.charged_to_claim("b"), CONTEXT);
    assert_eq!(tenant.end(), "");
    // A container adds a grant of its own, with all memory.
    let mut more = files::open_control(&container.grant().join("b")).unwrap().read().unwrap();
    more.gpus[0].memory = GpuLimit::WHOLE;
    container.add_claim("0", &more);
    container.add_claim("z", &more);
    assert_eq!(container.begun("dlsym").ask("fill plain 64"), format!("{PIECES} 2"));
    // A damaged grant is an error, not a way around the others.
    std::fs::write(container.grant().join("z/control"), "").unwrap();
    assert_ne!(container.start("dlsym").ask("begin"), "0");
}

/// Covers allocations through less common interfaces: memory nodes of graphs, and version 1 of the
/// array functions.
#[test]
fn allocations_of_graphs_and_old_interfaces_stop_at_the_limit() {
    for door in ["link", "dlsym", "proc"] {
        for way in ["graph", "node", "captured", "old-array"] {
            let container = Container::with_memory(LIMIT);
            let mut tenant = container.begun(door);
            assert_eq!(tenant.ask(&format!("fill {way} 64")), format!("{PIECES} 2"), "{door} {way}");
            assert!(container.most() <= LIMIT, "{door} {way}: {} taken", container.most());
            assert_eq!(tenant.end(), "");
        }
    }
}

/// Each level of a layered array has half the width and height, and the same number of layers.
#[test]
fn all_levels_of_a_layered_array_are_charged() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.begun("proc");
    assert!(tenant.ask("fill layers 64").ends_with(" 2"));
    assert!(container.most() <= LIMIT, "{} taken", container.most());
}

/// An invalidated capture has no graph, so its memory is refunded.
#[test]
fn an_invalidated_capture_is_refunded() {
    let mut tenant = Container::with_memory(LIMIT).begun("dlsym");
    for _ in 0..3 {
        assert_eq!(tenant.ask("spoil x 3000"), "0 901");
        assert_eq!(tenant.ask("info"), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT));
    }
}

#[test]
fn the_heap_of_kernels_is_charged() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.begun("proc");
    assert_eq!(tenant.ask("take heap 5000"), "2");
    assert_eq!(tenant.ask("take heap 3000"), "0");
    assert_eq!(tenant.ask("take plain 1000"), "2");
    assert_eq!(tenant.ask("take heap 100"), "0", "a smaller one gives back");
    assert_eq!(tenant.ask("take plain 1000"), "0");
    assert!(container.most() <= LIMIT);
}

/// A destroyed pool exists as long as some of its memory is in use, and so does its charge.
#[test]
fn memory_of_a_destroyed_pool_is_charged_until_it_is_freed() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.begun("proc");
    for _ in 0..3 {
        let answer = tenant.ask("fill left 64");
        let (count, status) = answer.split_once(' ').unwrap();
        // Without an agent, the size of two allocations stays reserved for code.
        assert!((PIECES - 2..=PIECES).contains(&count.parse().unwrap()) && status == "2", "{answer}");
        assert!(container.most() <= LIMIT, "{} taken", container.most());
        assert_eq!(tenant.ask("free left"), "0");
    }
    assert_eq!(tenant.ask("info"), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT));
    assert_eq!(tenant.end(), "");
}

/// A second import of the same memory returns the same address, and each import must be closed.
#[test]
fn memory_that_is_imported_twice_is_charged_once() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.begun("dlsym");
    let has = |tenant: &mut Tenant, held: u64| {
        assert_eq!(tenant.ask("info"), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT - held));
    };
    assert_eq!(tenant.ask("take opened 3000"), "0");
    assert_eq!(tenant.ask("take opened 3000"), "0");
    has(&mut tenant, 3000);
    assert_eq!(tenant.ask("free opened"), "0", "both");
    has(&mut tenant, 0);
    assert_eq!(tenant.ask("take opened 5000"), "2");
    has(&mut tenant, 0);
}

/// The charge does not depend on the number of mappings.
#[test]
fn imported_memory_is_charged_as_far_as_it_is_mapped() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.begun("link");
    assert_eq!(tenant.ask("import x 500"), "0");
    assert_eq!(tenant.ask("info"), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT - 1000));
    assert_eq!(tenant.ask("unimport x 500"), "1", "the simulated driver never had it");
    assert_eq!(tenant.ask("import x 2000"), "2", "the second piece is too much");
}

/// A green context creates the primary context, which the program never requested.
#[test]
fn a_green_context_retains_the_primary_context() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.start("link");
    assert_eq!(tenant.ask("init"), "0");
    assert_eq!(tenant.ask("take green 0"), "0");
    assert_eq!(tenant.ask("begin"), "0");
    assert_eq!(tenant.ask("info"), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT));
    assert_eq!(tenant.ask("end"), "0");
    assert_eq!(tenant.ask("info"), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT), "the green one keeps it");
    assert_eq!(tenant.ask("free green"), "0");
    let small = Container::with_memory(CONTEXT - 1);
    let mut tenant = small.start("link");
    assert_eq!(tenant.ask("init"), "0");
    assert_eq!(tenant.ask("take green 0"), "2", "no room for a context");
}

#[test]
fn a_reset_refunds_everything() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.begun("dlsym");
    assert_eq!(tenant.ask("begin"), "0", "twice");
    assert_eq!(tenant.ask("fill plain 64"), format!("{PIECES} 2"));
    assert_eq!(tenant.ask("run sync 1000 10"), "0");
    assert_eq!(tenant.ask("reset"), "0");
    assert_eq!(tenant.ask("begin"), "0");
    assert_eq!(tenant.ask("fill plain 64"), format!("{PIECES} 2"));
    assert!(container.most() <= LIMIT);
}

#[test]
fn freed_memory_can_be_allocated_again() {
    for way in ["plain", "pitch", "vmm", "async", "graph", "captured"] {
        let container = Container::with_memory(LIMIT);
        let mut tenant = container.begun("proc");
        for _ in 0..5 {
            assert_eq!(tenant.ask(&format!("fill {way} 64")), format!("{PIECES} 2"), "{way}");
            assert_eq!(tenant.ask(&format!("free {way}")), "0");
        }
        assert_eq!(tenant.ask("fill plain 64"), format!("{PIECES} 2"), "{way}, then plain");
        assert!(container.most() <= LIMIT);
    }
}

#[test]
fn contexts_are_charged() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.begun("dlsym");
    assert_eq!(tenant.ask("fill context 0"), format!("{} 2", LIMIT / CONTEXT - 1));
    assert!(container.most() <= LIMIT);
    assert_eq!(tenant.ask("free context"), "0");
    assert_eq!(tenant.ask("end"), "0");
    let small = Container::with_memory(CONTEXT - 1);
    assert_eq!(small.start("dlsym").ask("begin"), "2", "no room for a context");
}

/// The first process is charged an upper bound for its context until the agent has measured it. A
/// second process that would fit waits for that.
#[test]
fn a_context_is_charged_what_it_takes() {
    let container = Container::with_memory(1024);
    container.set_context_size(0);
    let (agent, mut account) = (ManualArbiter::start(&container), container.account());
    let (mut one, mut two) = (container.start("proc"), container.start("link"));
    one.tell("begin");
    until(|| account.is_awaiting_measurement());
    two.tell("begin");
    container.set_context_size(CONTEXT);
    agent.publish(0);
    assert_eq!((one.answer(), two.answer()), ("0".to_owned(), "0".to_owned()));
    let free = 1024 - 2 * CONTEXT;
    for tenant in [&mut one, &mut two] {
        assert_eq!(tenant.ask("info"), format!("{free} 1024 1024"));
    }
    assert_eq!(one.ask("end"), "0");
    assert_eq!(two.ask("info"), format!("{} 1024 1024", 1024 - CONTEXT), "exactly the charge is refunded");
}

/// Without an agent the size of a context stays unknown, and an upper bound is charged.
#[test]
fn contexts_of_unknown_size_are_charged_an_upper_bound() {
    let container = Container::with_memory(1024);
    container.set_context_size(0);
    let mut one = container.begun("proc");
    assert_eq!(one.ask("info"), "496 1024 1024");
    assert_eq!(container.start("link").ask("begin"), "2");
}

/// The agent has measured uncharged memory of a process that has ended since.
#[test]
fn uncharged_memory_of_an_ended_process_is_measured_again() {
    let container = Container::with_memory(LIMIT);
    let (agent, mut account) = (ManualArbiter::start(&container), container.account());
    let mut first = container.begun("proc");
    assert_eq!(first.ask("take plain 1000"), "0");
    agent.publish(300);
    first.end();
    let mut second = container.begun("dlsym");
    second.tell("info");
    agent.measure(&mut account, 0);
    assert_eq!(second.answer(), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT));
    agent.publish(100);
    assert_eq!(second.ask("info"), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT - 100), "without a wait");
}

#[test]
fn destroying_a_context_refunds_its_allocations() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.begun("link");
    assert_eq!(tenant.ask("fill plain 64"), format!("{PIECES} 2"));
    assert_eq!(tenant.ask("end"), "0");
    assert_eq!(tenant.ask("begin"), "0");
    assert_eq!(tenant.ask("fill plain 64"), format!("{PIECES} 2"));
}

#[test]
fn host_memory_is_not_charged() {
    let container = Container::with_memory(LIMIT);
    let mut tenant = container.begun("proc");
    assert_eq!(tenant.ask("take host 8192"), "0");
    assert_eq!(tenant.ask("fill plain 64"), format!("{PIECES} 2"));
}

#[test]
fn a_program_sees_its_limit_as_total_memory() {
    for door in ["link", "dlsym", "proc"] {
        let container = Container::with_memory(LIMIT);
        let mut tenant = container.begun(door);
        assert_eq!(tenant.ask("info"), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT));
        tenant.ask("take plain 96");
        assert_eq!(tenant.ask("info"), format!("{} {LIMIT} {LIMIT}", LIMIT - CONTEXT - 96));
    }
}

/// A monitoring program such as nvidia-smi runs beside a program that holds memory. The library
/// must not make the monitoring program load the driver.
#[test]
fn a_monitoring_program_sees_the_limit() {
    let container = Container::with(LIMIT, 50);
    let mut tenant = container.begun("proc");
    tenant.ask("take plain 96");
    let (free, used) = (LIMIT - CONTEXT - 96, CONTEXT + 96);
    let shown = format!("{LIMIT} {free} {used}");
    assert_eq!(container.watched(), format!("0: {shown}, {shown}, no driver"));
}

#[test]
fn a_whole_gpu_is_reported_unchanged() {
    let container = Container::with_memory(u64::MAX >> 20);
    let mut tenant = container.begun("link");
    assert_eq!(tenant.ask("info"), format!("{} 81920 81920", 81_920 - CONTEXT));
    assert_eq!(tenant.ask("take plain 70000"), "0");
    assert_eq!(tenant.ask("take plain 70000"), "2", "the GPU itself is full");
}

#[test]
fn limits_change_while_a_program_runs() {
    let container = Container::with_memory(1024);
    let mut tenant = container.begun("proc");
    let room = |limit: u64| (limit - CONTEXT) / 64;
    assert_eq!(tenant.ask("fill plain 64"), format!("{} 2", room(1024)));
    container.limit(2048, 100);
    assert_eq!(
        tenant.ask("fill plain 64"),
        format!("{} 2", room(2048) - room(1024)),
        "growing works at once"
    );
    container.limit(1024, 100);
    assert_eq!(tenant.ask("take plain 64"), "2", "shrinking stops further memory");
    assert_eq!(tenant.ask("free plain"), "0");
    assert_eq!(tenant.ask("fill plain 64"), format!("{} 2", room(1024)));
}

#[test]
fn processes_share_one_limit() {
    let container = Container::with_memory(LIMIT);
    let (mut one, mut two) = (container.begun("proc"), container.begun("link"));
    assert_eq!(one.ask("take plain 2000"), "0");
    assert_eq!(two.ask("take plain 2000"), "2");
    assert_eq!(two.ask("take plain 1000"), "0");
    one.end();
    assert_eq!(two.ask("take plain 2000"), "0", "what a process held comes back when it ends");
    assert!(container.most() <= LIMIT);
}

/// Two processes race thousands of times for memory that only one can get. The usage of the GPU
/// never exceeds the limit.
#[test]
fn racing_processes_never_exceed_the_limit() {
    let container = Container::with_memory(2 * CONTEXT + 1000);
    let (mut one, mut two) = (container.begun("proc"), container.begun("dlsym"));
    one.tell("race plain 600 10000");
    two.tell("race plain 600 10000");
    let won: Vec<u64> = [one.answer(), two.answer()].iter().map(|answer| answer.parse().unwrap()).collect();
    assert!(won.iter().any(|&won| won > 0), "{won:?}");
    assert!(container.most() <= 2 * CONTEXT + 1000, "{}", container.most());
}

/// Each GPU has its own limit in any device order, also for allocations on a device that is not the
/// current one.
#[test]
fn each_gpu_has_its_own_limit_in_any_order() {
    let limits = [2048, 1024, 3072];
    for order in ["0,1,2", "2,0,1", "1,2"] {
        let gpus: Vec<usize> = order.split(',').map(|gpu| gpu.parse().unwrap()).collect();
        for way in ["plain", "vmm", "async"] {
            let container = Container::with_gpus(&limits.map(|memory| (memory, 100)), order);
            let mut tenant = container.start("proc");
            for (device, &gpu) in gpus.iter().enumerate() {
                tenant.ask(&format!("on {device}"));
                assert_eq!(tenant.ask("begin"), "0");
                let room = (limits[gpu] - CONTEXT) / 64;
                assert_eq!(
                    tenant.ask(&format!("fill {way} 64")),
                    format!("{room} 2"),
                    "{order} {device} {way}"
                );
                let left = limits[gpu] - CONTEXT - room * 64;
                assert_eq!(
                    tenant.ask("info"),
                    format!("{left} {0} {0}", limits[gpu]),
                    "{order} {device} {way}"
                );
            }
        }
    }
}

#[test]
fn a_gpu_outside_the_grant_cannot_be_used() {
    let container = Container::with_gpus(&[(2048, 100)], "1,0");
    let mut tenant = container.start("link");
    assert_eq!(tenant.ask("begin"), "2");
    tenant.ask("on 1");
    assert_eq!(tenant.ask("begin"), "0");
    assert!(tenant.end().contains("is not part of this container's grant"));
}
