//! Measures the CPU usage of an idle agent with 8 simulated GPUs and 100 pods with shares, first
//! without processes, then with two processes per pod. The embedded kubelet runs in the same
//! process, on threads that are not counted. `cargo bench -p tessera-agent --bench idle`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Duration;

use common::{RegistrationWay, World};
use tessera_sim::threads::ThreadTimes;
use tokio::runtime::{Builder, Handle, Runtime};

/// Duration of a measurement.
const MEASURED: Duration = Duration::from_secs(20);

async fn watch(what: &str) {
    // Let earlier work settle.
    tokio::time::sleep(Duration::from_secs(3)).await;
    let before = ThreadTimes::of(std::process::id()).unwrap();
    tokio::time::sleep(MEASURED).await;
    let spent = ThreadTimes::of(std::process::id()).unwrap().since(&before, MEASURED).without("kubelet");
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
    let mut world = World::new(RegistrationWay::Registry).await;
    world.pods_with_shares().await;
    // Use the default interval, because tests sample far more often.
    world.stop_agent().await;
    world.sample_interval = tessera_agent::shell::Sampling::default().interval;
    world.runtime = agent;
    world.start_agent().await;
    world.until_served().await;
    watch("no processes").await;
    world.processes_of_all();
    watch("200 busy processes").await;
}
