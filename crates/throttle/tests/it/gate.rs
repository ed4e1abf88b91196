//! The launch gate and the controller, step by step.

use std::rc::Rc;

use tessera_throttle::Nanos;
use tessera_throttle::back_pressure::{MAX_HOLD, QUEUE_LIMIT};
use tessera_throttle::captures::Captures;
use tessera_throttle::controller::{ArbiterWindow, GpuController, LimitRule, Sleep, WindowDemand};
use tessera_throttle::costs::CostTable;
use tessera_throttle::driver::StreamName;
use tessera_throttle::gate::{Entered, HeldBack, LaunchGate};
use tessera_throttle::pacer::Pacer;

use crate::gpu::{Gpu, SimulatedDriver};

const STREAM: StreamName = StreamName { handle: 0x5000, per_thread: false };
const OTHER: StreamName = StreamName { handle: 0x6000, per_thread: false };
const START: Nanos = Nanos::from_secs(10);
const KEY: u64 = 7 << 40;

/// A process with one gate.
struct Stage {
    gpu: Rc<Gpu>,
    driver: SimulatedDriver,
    gate: &'static LaunchGate<u32>,
    costs: CostTable,
    captures: Captures,
    controller: GpuController,
    /// Busy time that was charged so far.
    charged: Nanos,
}

impl Stage {
    fn new(percent: u32) -> Self {
        let gpu = Rc::new(Gpu::default());
        gpu.now.set(START);
        let gate: &'static LaunchGate<u32> = Box::leak(Box::default());
        gate.set_limit(percent, true);
        let driver = SimulatedDriver::new(gpu.clone(), 0);
        Self {
            gpu,
            driver,
            gate,
            costs: CostTable::default(),
            captures: Captures::default(),
            controller: GpuController::default(),
            charged: Nanos::ZERO,
        }
    }

    fn enter(&self, stream: StreamName) -> Result<Entered, HeldBack> {
        self.gate.try_enter(&self.driver, self.driver.id(stream), Some(&self.costs))
    }

    /// Launches a kernel, which the gate lets pass.
    fn launch(&self, stream: StreamName, length: Nanos) {
        if self.enter(stream).unwrap() == Entered::FirstWork {
            let _ = self.gate.mark_busy(self.gpu.now.get());
        }
        let id = self.driver.id(stream);
        let launch = self.gate.begin(&self.driver, id, KEY, &self.costs);
        self.driver.launch(stream, length);
        launch.end(&self.driver, true);
    }

    fn pass(&self, time: Nanos) {
        self.gpu.now.set(self.gpu.now.get() + time);
    }

    /// Starts a round; returns whether the debts of the shared account are cleared.
    fn follow(&mut self, has_arbiter: bool) -> bool {
        let now = self.gpu.now.get();
        let rule = LimitRule { percent: self.gate.percent(), has_arbiter };
        let clears_debts = self.controller.set_rule(now, rule, self.gate);
        if self.gate.is_busy() {
            let charge = self.controller.follow(now, &self.driver, self.gate, &self.costs, &self.captures);
            self.charged += charge.map_or(Nanos::ZERO, |charge| charge.busy);
        }
        clears_debts
    }

    /// Runs a round without an arbiter; returns whether blocked threads are woken.
    fn round(&mut self) -> bool {
        self.shared_round(Pacer::default())
    }

    /// Runs a round beside other processes of the container; returns whether blocked threads are woken.
    fn shared_round(&mut self, shared: Pacer) -> bool {
        self.follow(false);
        self.controller.follow_account(self.gpu.now.get(), shared, self.gate).wake_blocked
    }

    /// Runs a round under an arbiter.
    fn window_round(&mut self, window: ArbiterWindow) -> (bool, Option<WindowDemand>, Sleep) {
        self.follow(true);
        let decision = self.controller.follow_window(self.gpu.now.get(), window, self.gate);
        (decision.wake_blocked, decision.report, decision.sleep)
    }
}

#[test]
fn the_first_launch_waits_until_the_gate_opens() {
    let mut stage = Stage::new(50);
    assert_eq!(stage.enter(STREAM), Err(HeldBack::Closed));
    assert!(stage.gate.block(START).1, "the monitor thread does not know of the launch");
    assert!(stage.gate.has_blocked_launches());
    assert!(stage.round(), "blocked threads are woken");
    assert_eq!(stage.enter(STREAM), Ok(Entered::FirstWork));
}

#[test]
fn only_a_gate_that_was_closed_wakes_its_threads() {
    let stage = Stage::new(50);
    assert!(stage.gate.set_open(true));
    assert!(!stage.gate.set_open(true) && !stage.gate.set_open(false) && !stage.gate.set_open(false));
    assert!(stage.gate.set_open(true));
}

#[test]
fn a_launch_counts_as_busy_until_it_ends() {
    let stage = Stage::new(50);
    let _ = stage.gate.set_open(true);
    assert!(!stage.gate.is_busy());
    assert_eq!(stage.enter(STREAM), Ok(Entered::FirstWork));
    assert!(stage.gate.is_busy(), "it is in flight");
    let id = stage.driver.id(STREAM);
    stage.gate.begin(&stage.driver, id, KEY, &stage.costs).end(&stage.driver, false);
    assert!(!stage.gate.is_busy(), "the driver refused it");
    let _ = stage.gate.set_open(false);
    assert_eq!(stage.enter(STREAM), Err(HeldBack::Closed));
    assert!(!stage.gate.is_busy(), "a launch that is held back is not in flight");
}

#[test]
fn a_full_queue_holds_launches_back_until_it_has_room() {
    let stage = Stage::new(50);
    let _ = stage.gate.set_open(true);
    let kernel = Nanos::from_millis(1);
    let mut launched = 0;
    while stage.enter(STREAM).is_ok() {
        let id = stage.driver.id(STREAM);
        let launch = stage.gate.begin(&stage.driver, id, KEY, &stage.costs);
        stage.driver.launch(STREAM, kernel);
        launch.end(&stage.driver, true);
        launched += 1;
        assert!(launched < 20, "nothing bounds the queue");
    }
    assert!(stage.gpu.queued() >= QUEUE_LIMIT && stage.gpu.queued() <= QUEUE_LIMIT * 4);
    let Err(HeldBack::Full(sleep)) = stage.enter(STREAM) else { panic!("the queue is full") };
    assert!(sleep < stage.gpu.queued(), "the GPU has work when the launch tries again");
    stage.pass(stage.gpu.queued());
    assert!(stage.enter(STREAM).is_ok(), "the launch polls by itself");
}

#[test]
fn a_full_queue_does_not_hold_a_launch_back_for_ever() {
    let stage = Stage::new(50);
    let _ = stage.gate.set_open(true);
    (0..8).for_each(|_| {
        if stage.enter(STREAM).is_ok() {
            let id = stage.driver.id(STREAM);
            let launch = stage.gate.begin(&stage.driver, id, KEY, &stage.costs);
            stage.driver.launch(STREAM, Nanos::from_secs(60));
            launch.end(&stage.driver, true);
        }
    });
    let (blocked, must_notify) = stage.gate.block(START);
    assert!(!must_notify, "the monitor thread is at work already");
    let id = stage.driver.id(STREAM);
    let enter = |now| blocked.try_enter(&stage.driver, id, &stage.costs, now);
    assert!(matches!(enter(START), Err(HeldBack::Full(sleep)) if sleep <= MAX_HOLD));
    assert!(enter(START + MAX_HOLD - Nanos(1)).is_err());
    assert!(enter(START + MAX_HOLD).is_ok(), "the work may depend on this launch");
}

#[test]
fn streams_do_not_wait_for_each_other() {
    let stage = Stage::new(50);
    let _ = stage.gate.set_open(true);
    while stage.enter(STREAM).is_ok() {
        let id = stage.driver.id(STREAM);
        let launch = stage.gate.begin(&stage.driver, id, KEY, &stage.costs);
        stage.driver.launch(STREAM, Nanos::from_millis(1));
        launch.end(&stage.driver, true);
    }
    assert!(stage.enter(OTHER).is_ok(), "another stream has nothing queued");
}

#[test]
fn work_that_depends_on_a_blocked_launch_gets_it() {
    let mut stage = Stage::new(10);
    assert!(stage.round());
    // This launch stays in a call of the driver until another one comes.
    assert!(stage.enter(STREAM).is_ok());
    let _ = stage.gate.mark_busy(START);
    let mut waited = Nanos::ZERO;
    while !stage.gate.is_closed() {
        stage.pass(Nanos::from_micros(500));
        let _ = stage.round();
    }
    let mut is_woken = false;
    while !is_woken && waited < Nanos::from_secs(10) {
        stage.pass(Nanos::from_micros(500));
        waited += Nanos::from_micros(500);
        is_woken = stage.round();
    }
    assert!(waited <= MAX_HOLD + Nanos::from_millis(1), "{waited:?}");
}

#[test]
fn work_that_depends_on_a_launch_behind_a_full_queue_gets_it() {
    let mut stage = Stage::new(10);
    assert!(stage.round());
    let _ = stage.costs.expect(KEY);
    stage.costs.learn(KEY, 1_000.0);
    // These kernels run until another stream has launched, and fill the queue of all streams together.
    stage.launch(STREAM, Nanos::from_secs(1_000));
    stage.launch(STREAM, Nanos::from_secs(1_000));
    let (mut blocked, _) = stage.gate.block(START);
    let id = stage.driver.id(OTHER);
    let mut waited = Nanos::ZERO;
    loop {
        match blocked.try_enter(&stage.driver, id, &stage.costs, START + waited) {
            Ok(_) => break,
            Err(HeldBack::Closed) => blocked.was_closed(START + waited),
            Err(HeldBack::Full(_)) => {}
        }
        stage.pass(Nanos::from_micros(500));
        waited += Nanos::from_micros(500);
        let _ = stage.round();
        // The gate is open for a window, closed for the longest hold, and then the queue is.
        assert!(waited <= MAX_HOLD * 2 + Nanos::from_millis(50), "the launch waits for ever");
    }
}

#[test]
fn a_launch_does_not_wait_for_ever_for_an_account_that_runs_away() {
    let mut stage = Stage::new(25);
    let _ = stage.gate.block(START);
    // Stuck work of another process is charged all the time, so the account stays ahead of the clock.
    let ahead = |stage: &Stage| Pacer::at(stage.gpu.now.get() + Nanos::from_millis(1));
    assert!(!stage.shared_round(ahead(&stage)));
    // Work that was queued by others may take four times the longest hold, which is paid for at 25 %.
    stage.pass(MAX_HOLD * 4 * 4);
    assert!(!stage.shared_round(ahead(&stage)), "others' work may still end");
    stage.pass(Nanos(1));
    assert!(stage.shared_round(ahead(&stage)), "the launch is woken");
    assert!(stage.follow(false), "the debts are cleared, so that the window is a whole one");
    assert!(!stage.follow(false), "they are cleared once");
}

#[test]
fn a_process_waits_for_all_that_it_owes_itself() {
    let mut stage = Stage::new(10);
    assert!(stage.round());
    stage.launch(STREAM, Nanos::from_secs(2));
    settle(&mut stage);
    let _ = stage.gate.block(stage.gpu.now.get());
    // Half a period of 200 ms was unused before the work began.
    let account = START + stage.charged * 10 - Nanos::from_millis(100);
    assert!(account > stage.gpu.now.get() + MAX_HOLD * 4 * 10, "the debt is larger than others' could be");
    stage.gpu.now.set(account - Nanos(1));
    assert!(!stage.shared_round(Pacer::at(account)));
    stage.pass(Nanos(1));
    assert!(stage.shared_round(Pacer::at(account)));
    assert!(!stage.follow(false), "no debt is left");
}

/// Runs rounds until the gate is idle.
fn settle(stage: &mut Stage) {
    while stage.gate.is_busy() {
        stage.pass(Nanos::from_micros(500));
        let _ = stage.round();
    }
}

#[test]
fn work_that_begins_when_the_last_work_ends_is_charged() {
    let mut stage = Stage::new(50);
    assert!(stage.round());
    stage.launch(STREAM, Nanos::from_millis(5));
    settle(&mut stage);
    // The monitor thread has just seen the end, and wakes up late for the next launch.
    let before = stage.charged;
    stage.launch(STREAM, Nanos::from_millis(5));
    stage.pass(Nanos::from_millis(3));
    let _ = stage.round();
    settle(&mut stage);
    assert_eq!(stage.charged - before, Nanos::from_millis(5));
}

#[test]
fn a_pause_is_not_charged_to_the_launch_that_ends_it() {
    // The monitor thread may look while the launch is on its way and has not said since when it runs.
    for looks_early in [false, true] {
        let mut stage = Stage::new(50);
        assert!(stage.round());
        stage.launch(STREAM, Nanos::from_millis(2));
        settle(&mut stage);
        stage.pass(Nanos::from_millis(10));
        let (before, begin) = (stage.charged, stage.gpu.now.get());
        assert_eq!(stage.enter(STREAM), Ok(Entered::FirstWork));
        if looks_early {
            let _ = stage.round();
            assert_eq!(stage.charged, before, "nothing runs yet");
        }
        stage.pass(Nanos::from_micros(50));
        let _ = stage.gate.mark_busy(stage.gpu.now.get());
        let id = stage.driver.id(STREAM);
        let launch = stage.gate.begin(&stage.driver, id, KEY, &stage.costs);
        stage.driver.launch(STREAM, Nanos::from_millis(2));
        launch.end(&stage.driver, true);
        settle(&mut stage);
        let (charged, passed) = (stage.charged - before, stage.gpu.now.get() - begin);
        assert!(charged >= Nanos::from_millis(2) && charged <= passed, "{charged:?} in {passed:?}");
    }
}

#[test]
fn a_window_is_returned_when_the_work_has_ended() {
    let mut stage = Stage::new(50);
    let wants = |wants, drained| Some(WindowDemand { wants, drained });
    let closed = ArbiterWindow { change: 0, number: 0, deadline: Nanos::ZERO, queue_limit: Nanos::ZERO };
    assert_eq!(stage.window_round(closed), (false, None, Sleep::UntilWork));
    let (blocked, _) = stage.gate.block(START);
    let (wakes, report, sleep) = stage.window_round(closed);
    assert_eq!((wakes, report), (false, wants(true, 0)), "a launch is blocked");
    assert!(matches!(sleep, Sleep::UntilWindowChanges { change: 0, .. }));

    let window = ArbiterWindow {
        change: 1,
        number: 1,
        deadline: START + Nanos::from_millis(20),
        queue_limit: Nanos::ZERO,
    };
    let (wakes, report, _) = stage.window_round(window);
    assert_eq!((wakes, report), (true, None), "the window has opened");
    stage.launch(STREAM, Nanos::from_millis(1));
    blocked.finish(START);
    stage.pass(Nanos::from_millis(2));
    // The first rounds put a fence behind the work, see it reached, and let a short pause pass.
    let mut reports = Vec::new();
    for _ in 0..10 {
        reports.extend(stage.window_round(window).1);
        stage.pass(Nanos::from_micros(500));
    }
    assert_eq!(reports, [WindowDemand { wants: false, drained: 1 }]);
    assert!(stage.gate.is_closed(), "another tenant may have the GPU");
    assert_eq!(stage.enter(STREAM), Err(HeldBack::Closed));

    let _ = stage.gate.block(START);
    let (wakes, report, _) = stage.window_round(window);
    assert_eq!((wakes, report), (false, wants(true, 1)), "the returned window is not used again");
    let moved = ArbiterWindow { change: 2, ..window };
    let (wakes, report, _) = stage.window_round(moved);
    assert_eq!((wakes, report), (true, wants(true, 0)), "the arbiter has changed the window");
}

#[test]
fn no_event_is_recorded_while_a_capture_runs() {
    let mut stage = Stage::new(50);
    assert!(stage.round());
    // The fourth launch of a kind is not measured, and too short for a fence of its own.
    for _ in 0..3 {
        stage.launch(STREAM, Nanos::from_micros(10));
        stage.pass(Nanos::from_millis(1));
        let _ = stage.round();
    }
    stage.launch(STREAM, Nanos::from_micros(10));
    stage.captures.begin();
    stage.gate.settle_for_capture();
    let (recorded, charged) = (stage.driver.recorded.get(), stage.charged);
    for _ in 0..100 {
        stage.pass(Nanos::from_millis(1));
        let _ = stage.round();
    }
    assert_eq!(stage.driver.recorded.get(), recorded);
    assert!(!stage.gate.is_busy(), "the work counts as ended when its time is over");
    let charged = stage.charged - charged;
    assert!(charged <= Nanos::from_micros(40), "{charged:?} for 10 us of work");
}

#[test]
fn a_process_with_two_gpus_hears_of_work_on_both() {
    let window = Sleep::UntilWindowChanges { change: 3, timeout: Nanos::from_millis(100) };
    assert_eq!(Sleep::UntilWork.shorter(Sleep::UntilWork), Sleep::UntilWork);
    let Sleep::For(time) = window.shorter(Sleep::UntilWork) else { panic!("it waits for one window") };
    assert!(time <= Nanos::from_millis(1), "{time:?}");
    assert_eq!(Sleep::For(Nanos(5)).shorter(window), Sleep::For(Nanos(5)));
}
