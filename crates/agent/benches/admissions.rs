//! Measures how many pods per second the agent admits, with the embedded kubelet and its real rate
//! limit. `cargo bench -p tessera-agent --bench admissions`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Instant;

use common::{RegistrationWay, World};

/// Pods on the node at a time.
const PODS_PER_ROUND: usize = 100;
/// Number of rounds.
const ROUNDS: usize = 5;

#[tokio::main]
async fn main() {
    let kinds: [(&str, &[(&str, &str)]); 2] = [
        ("aliyun.com/gpu-mem", &[("aliyun.com/gpu-mem", "4")]),
        ("tencent.com/vcuda-*", &[("tencent.com/vcuda-core", "5"), ("tencent.com/vcuda-memory", "10")]),
    ];
    for (kind, limits) in kinds {
        let world = World::new(RegistrationWay::Registry).await;
        let (mut admitting, mut pods, lists) = (0.0, 0, world.kubelet().lists());
        for round in 0..ROUNDS {
            let name = |number: usize| format!("p{round}-{number}");
            let bound: Vec<_> = (0..PODS_PER_ROUND)
                .map(|number| world.bind(&name(number), limits, Some(u8::try_from(number % 8).unwrap())))
                .collect();
            let start = Instant::now();
            for pod in &bound {
                world.kubelet().admit(pod).await.unwrap();
            }
            admitting += start.elapsed().as_secs_f64();
            pods += bound.len();
            for pod in &bound {
                world.kubelet().remove(&pod.metadata.uid);
                world.api.delete(&pod.metadata.uid);
            }
        }
        let lists = world.kubelet().lists() - lists;
        println!(
            "{kind}: {pods} pods admitted in {admitting:.2} s, {:.0} per second, {lists} lists",
            pods as f64 / admitting
        );
    }
}
