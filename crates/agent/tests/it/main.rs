//! The whole agent with the embedded kubelet, over real sockets.

#![allow(clippy::unwrap_used, reason = "helpers of tests may fail like tests")]

mod access;
#[path = "../common/mod.rs"]
mod common;
mod documentation;
mod exporter;
mod node_watch;
mod situations;

use std::sync::atomic::Ordering;

use common::{RegistrationWay, World, fixtures::uuid, with_timeout};
use tessera_limits::{GpuSlot, files, futex, memory_account::ProcessIdentity};
use tessera_sim::kubelet::KubeletError;
use tessera_wire::tessera::inventory;

const SHARE: [(&str, &str); 2] = [("tencent.com/vcuda-core", "30"), ("tencent.com/vcuda-memory", "40")];

#[tokio::test(flavor = "multi_thread")]
async fn publishes_the_gpus_of_the_node_and_arbitrates_shares() {
    let world = World::new(RegistrationWay::Registry).await;
    let pod = world.bind("share", &SHARE, Some(2));
    world.run(&pod).await.unwrap();
    let opened = tokio::task::spawn_blocking(until_a_window_opens(world.grants().join("uid-share/main")));
    with_timeout("a window of the container", opened).await.unwrap();
    let annotations = world.api.node.lock().unwrap().annotations.clone();
    assert_eq!(inventory::parse(&annotations[inventory::KEY]).unwrap().gpus.len(), 8);
    assert_eq!(annotations["NODE_TYPE"], "test.8xlarge");
}

/// Returns the work of the container's library: it requests a window on its GPU and sleeps until the
/// arbiter opens one.
fn until_a_window_opens(grant: std::path::PathBuf) -> impl FnOnce() {
    move || {
        let (control, account) = (files::open_control(&grant).unwrap(), files::open_account(&grant).unwrap());
        let id = std::process::id();
        let slot = account.claim(ProcessIdentity { id, started_ticks: 0 }, id, |_| {}).unwrap();
        account.slot(slot).demand[GpuSlot::FIRST].wants.store(1, Ordering::Release);
        files::ArbiterWakeup::of(&grant).notify();
        let window = control.window(GpuSlot::FIRST);
        loop {
            let state = window.read();
            if state.number > 0 {
                break;
            }
            futex::wait(&window.change, state.change, u64::from(u32::MAX));
        }
        assert!(control.has_arbiter(futex::now()));
    }
}

async fn survives_restarts(way: RegistrationWay) {
    let mut world = World::new(way).await;
    let first = world.bind("first", &SHARE, Some(6));
    world.run(&first).await.unwrap();
    let held = world.kubelet().holds("uid-first", "main");

    // The kubelet restarts, and a pod is bound while it is down.
    let checkpoint = world.kubelet.take().unwrap().stop().await;
    let meanwhile = world.bind("meanwhile", &SHARE, Some(1));
    world.start_kubelet(checkpoint);
    world.until_served().await;
    let given = world.run(&meanwhile).await.unwrap();
    assert_eq!(given["main"].envs["NVIDIA_VISIBLE_DEVICES"], uuid(1));

    // The agent restarts, a container restarts, and the next pod gets its GPUs.
    world.stop_agent().await;
    world.until_allocatable("nvidia.com/gpu", 0).await;
    world.start_agent().await;
    world.until_served().await;
    world.kubelet().start_containers(&first).await.unwrap();
    assert_eq!(world.kubelet().holds("uid-first", "main"), held);
    let whole = world.bind("whole", &[("nvidia.com/gpu", "6")], None);
    let given = world.run(&whole).await.unwrap();
    let gpus: Vec<String> = [0, 2, 3, 4, 5, 7].map(uuid).to_vec();
    assert_eq!(given["main"].envs["NVIDIA_VISIBLE_DEVICES"], gpus.join(","));
}

#[tokio::test(flavor = "multi_thread")]
async fn survives_restarts_with_the_plugins_registry() {
    survives_restarts(RegistrationWay::Registry).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn survives_restarts_with_kubelet_sock() {
    survives_restarts(RegistrationWay::Socket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn admits_equal_pods_in_any_order_with_one_list_each() {
    let world = World::new(RegistrationWay::Registry).await;
    let pods: Vec<_> = (0..8u8).map(|gpu| world.bind(&format!("p{gpu}"), &SHARE, Some(gpu))).collect();
    let before = world.kubelet().lists();
    for pod in pods.iter().rev() {
        world.kubelet().admit(pod).await.unwrap();
        world.api.set_phase(&pod.metadata.uid, "Pending");
    }
    assert!(world.kubelet().lists() - before <= 9, "{} lists", world.kubelet().lists() - before);
    for (gpu, pod) in (0u8..).zip(&pods) {
        world.kubelet().start_containers(pod).await.unwrap();
        let ids = &world.kubelet().holds(&pod.metadata.uid, "main")["tencent.com/vcuda-core"];
        assert!(ids.iter().all(|id| id.starts_with(&format!("{gpu:08x}-"))), "{ids:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn returns_a_rejection_to_the_kubelet_and_withdraws_an_unhealthy_gpu() {
    let world = World::new(RegistrationWay::Registry).await;
    let all = world.bind("all", &[("nvidia.com/gpu", "8")], None);
    world.run(&all).await.unwrap();
    let late = world.bind("late", &[("aliyun.com/gpu-mem", "8")], None);
    let refused = world.run(&late).await.unwrap_err().to_string();
    assert!(refused.contains("no GPU with 8192 MiB left on node node-1"), "{refused}");
    std::fs::write(world.events(), "3 xid 79\n").unwrap();
    world.until_allocatable("tencent.com/vcuda-core", 700).await;
    world.api.until("the list", |api| *api.unhealthy.lock().unwrap() == Some(vec![3])).await;
    std::fs::write(world.events(), "3 xid 79\n3 back\n").unwrap();
    world.until_allocatable("tencent.com/vcuda-core", 800).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stops_while_the_kubelet_waits_for_an_answer() {
    let mut world = World::new(RegistrationWay::Registry).await;
    world.stop_agent().await;
    // This podresources server accepts connections and never answers.
    let socket = world.directory.path().join("kubelet/pod-resources/kubelet.sock");
    std::fs::remove_file(&socket).unwrap();
    let silent = tokio::net::UnixListener::bind(&socket).unwrap();
    world.start_agent().await;
    world.until_served().await;
    let pod = world.bind("waits", &SHARE, Some(3));
    let kubelet = world.kubelet.take().unwrap();
    let mut admission = std::pin::pin!(kubelet.admit(&pod));
    let connected = tokio::select! {
        answer = &mut admission => panic!("the agent answered without the kubelet's list: {answer:?}"),
        connected = with_timeout("the agent to ask for the kubelet's list", silent.accept()) => connected,
    };
    world.stop_agent().await;
    // The call may have reached the agent before it stopped, or not.
    let refused = with_timeout("the end of the admission", admission).await;
    assert!(matches!(refused, Err(KubeletError::Rejected(_))), "{refused:?}");
    drop(connected);
}
