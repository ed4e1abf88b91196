//! What an agent takes of a processor while nothing happens: 8 simulated cards, 100 pods that hold shares of them, first without a
//! process on a card, then with two of each pod. The embedded kubelet lives in the same process and does nothing by itself.
//! `cargo bench -p tessera-agent --bench idle`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/common/mod.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod common;

use std::time::Duration;

use common::{Way, World};
use tessera_sim::threads::Threads;

const OVER: Duration = Duration::from_secs(20);

async fn watch(what: &str) {
    // Whatever came before is over.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = Threads::of(std::process::id()).unwrap();
    tokio::time::sleep(OVER).await;
    let spent = Threads::of(std::process::id()).unwrap().since(&before, OVER);
    println!("{what}: {:.2} % of a core: {spent}", spent.percent());
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let mut world = World::new(Way::Registry).await;
    world.pods_with_shares().await;
    // As users have it: the tests look far more often.
    world.stop_agent().await;
    world.look_every = tessera_agent::shell::Sampling::default().every;
    world.start_agent();
    world.wait_until_served().await;
    watch("nobody computes").await;
    world.processes_of_all();
    watch("200 processes compute").await;
}
