//! Runs independent jobs on all cores.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;

use super::progress::Progress;

/// Runs jobs 0 to `total - 1` on as many threads as there are cores, and returns their results in
/// this order.
pub(super) fn run<T: Send>(total: usize, job: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let (sender, receiver) = mpsc::channel();
    let mut results: Vec<(usize, T)> = Vec::with_capacity(total);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from).min(total) {
            let (sender, next, job) = (sender.clone(), &next, &job);
            scope.spawn(move || {
                while let Some(number) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).filter(|number| *number < total)
                {
                    // The receiver lives until every sender is dropped.
                    let _ = sender.send((number, job(number)));
                }
            });
        }
        drop(sender);
        let mut progress = Progress::of(total);
        for result in receiver {
            progress.step("runs");
            results.push(result);
        }
    });
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}
