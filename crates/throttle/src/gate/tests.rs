//! Launches of several threads against a thread that closes the gate.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::LaunchGate;
use crate::costs::CostTable;
use crate::driver::{ContextId, Driver, StreamId, StreamName};
use crate::nanos::Nanos;

/// A driver whose work ends at once.
struct InstantDriver;

impl Driver for InstantDriver {
    type CaptureMode = ();
    type DriverEvent = u32;

    fn host_time(&self) -> Nanos {
        Nanos::ZERO
    }

    fn current_context(&self) -> ContextId {
        ContextId(0x1000)
    }

    fn set_context(&self, _context: ContextId) {}

    fn create_event(&self, _is_timed: bool) -> Option<u32> {
        Some(1)
    }

    fn record(&self, _event: u32, _stream: StreamId) -> bool {
        true
    }

    fn is_reached(&self, _event: u32) -> bool {
        true
    }

    fn elapsed_ms(&self, _from: u32, _to: u32) -> Option<f32> {
        Some(0.001)
    }

    fn is_capturing(&self, _stream: StreamName) -> bool {
        false
    }

    fn relax(&self) {}

    fn restore(&self, (): ()) {}
}

/// A thread that has closed the gate and then sees no launch in flight knows that none is at the driver.
#[test]
fn a_closed_gate_without_launches_in_flight_stays_empty() {
    const ROUNDS: u32 = 500;
    let (gate, costs) = (LaunchGate::<u32>::default(), CostTable::default());
    gate.set_limit(50, true);
    let (at_driver, has_ended) = (AtomicU32::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (gate, costs, at_driver, has_ended) = (&gate, &costs, &at_driver, &has_ended);
            let stream = StreamName { handle: 0x5000 + thread, per_thread: false };
            let id = stream.id(|| ContextId::NONE, || 0);
            scope.spawn(move || {
                let mut launches = 0;
                while !has_ended.load(Ordering::Relaxed) {
                    if gate.try_enter(&InstantDriver, id, Some(costs)).is_err() {
                        std::thread::yield_now();
                        continue;
                    }
                    let launch = gate.begin(&InstantDriver, id, 7 << 40, costs);
                    at_driver.fetch_add(1, Ordering::SeqCst);
                    launches += 1;
                    at_driver.fetch_sub(1, Ordering::SeqCst);
                    // The driver refuses some launches.
                    launch.end(&InstantDriver, launches % 3 != 0);
                }
            });
        }
        for _ in 0..ROUNDS {
            let _ = gate.set_open(true);
            std::thread::yield_now();
            let _ = gate.set_open(false);
            while gate.has_launches_in_flight() {
                std::thread::yield_now();
            }
            let seen: u32 = (0..100).map(|_| at_driver.load(Ordering::SeqCst)).sum();
            if seen != 0 {
                has_ended.store(true, Ordering::Relaxed);
            }
            assert_eq!(seen, 0, "a launch is at the driver behind a closed gate");
        }
        has_ended.store(true, Ordering::Relaxed);
    });
}
