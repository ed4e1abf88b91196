//! What an agent takes of a processor while nothing happens: 8 simulated GPUs, 100 pods that hold shares of them, first without a
//! process on a GPU, then with two of each pod. The embedded kubelet lives in the same process, on threads that are not counted.
//! `cargo bench -p tessera-agent --bench idle`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/common/mod.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod common;

use std::time::Duration;

use common::{Way, World};
use tessera_sim::threads::ThreadTimes;
use tokio::runtime::{Builder, Handle, Runtime};

const OVER: Duration = Duration::from_secs(20);

async fn watch(what: &str) {
    // Whatever came before is over.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = ThreadTimes::of(std::process::id()).unwrap();
    tokio::time::sleep(OVER).await;
    let spent = ThreadTimes::of(std::process::id()).unwrap().since(&before, OVER).without("kubelet");
    println!("{what}: {:.2} % of a core: {spent}", spent.percent());
}

fn runtime(name: &str) -> Runtime {
    Builder::new_multi_thread().worker_threads(2).thread_name(name).enable_all().build().unwrap()
}

fn main() {
    let agent = runtime("agent");
    runtime("kubelet").block_on(measure(agent.handle().clone()));
}

async fn measure(agent: Handle) {
    let mut world = World::new(Way::Registry).await;
    world.pods_with_shares().await;
    // As users have it: the tests look far more often.
    world.stop_agent().await;
    world.sample_interval = tessera_agent::shell::Sampling::default().interval;
    world.runtime = agent;
    world.start_agent();
    world.wait_until_served().await;
    watch("nobody computes").await;
    world.processes_of_all();
    watch("200 processes compute").await;
}
