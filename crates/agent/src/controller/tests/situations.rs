//! One situation per test: a pod or two, and what must become of them.

use tessera_node::gpus::{Incident, IncidentKind};
use tessera_wire::foreign::objects::Node;

use super::world::{World, found, pod, share};
use crate::controller::{Action, Event, EventTime, LibraryError, WithoutLibrary};

fn whole(count: u32) -> Vec<(&'static str, String)> {
    vec![("aliyun.com/gpu", count.to_string())]
}

fn missing_library() -> LibraryError {
    LibraryError::Read { path: "libtessera.so".to_owned(), cause: "no such file".to_owned() }
}

fn memory(units: u32) -> Vec<(&'static str, String)> {
    vec![("aliyun.com/gpu-mem", units.to_string())]
}

#[test]
fn a_granted_pod_gets_its_gpu_whichever_resource_comes_first() {
    for seed in 0..8 {
        let mut world = World::new();
        world.seed(seed);
        let given = world.run(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
        assert_eq!(world.gpus_of("u", "main"), [2].into());
        let envs = &given["main"].envs;
        assert_eq!(envs["NVIDIA_VISIBLE_DEVICES"], "GPU-00000002-0000-4000-8000-000000000000");
        world.check();
    }
}

#[test]
fn shares_come_with_the_library_and_whole_gpus_without() {
    let mut world = World::new();
    let share = world.run(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    let mounts: Vec<_> = share["main"].mounts.iter().map(|mount| mount.container_path.as_str()).collect();
    let expected =
        ["/etc/tessera", "/etc/tessera/account", "/usr/lib/tessera/libtessera.so", "/etc/ld.so.preload"];
    assert_eq!(mounts, expected);
    let whole = world.run(pod("q", "v", &[("main", whole(1))]), &[]).unwrap();
    assert!(whole["main"].mounts.is_empty());
    assert_eq!(world.limits.len(), 1);
    let limits = &world.limits[&("u".to_owned(), "main".to_owned())];
    let gpu = limits.gpus[0];
    assert_eq!((gpu.memory.whole_mib(), gpu.compute_percent, gpu.compute_ceiling_percent), (5120, 30, 30));
}

#[test]
fn without_the_library_shares_are_refused_or_served_with_an_event() {
    let mut world = World::new();
    world.settings.isolation.library = Err(missing_library());
    world.restart_agent();
    let refused = world.run(pod("p", "u", &[("main", share(30, 20))]), &[]).unwrap_err().to_string();
    assert!(refused.contains("libtessera.so cannot be read: no such file; ask for whole GPUs"), "{refused}");
    world.run(pod("q", "v", &[("main", whole(1))]), &[]).unwrap();
    assert!(publishes_whole_gpus_only(&mut world, &[]));
    assert!(!publishes_whole_gpus_only(&mut world, &[("cgpu.disable.isolation", "true")]));
    world.settings.isolation.allow_opt_out = true;
    world.restart_agent();
    assert!(!publishes_whole_gpus_only(&mut world, &[]), "pods that opt out are served");
    world.settings.isolation.without_library = WithoutLibrary::Serve;
    world.settings.isolation.allow_opt_out = false;
    world.restart_agent();
    assert!(!publishes_whole_gpus_only(&mut world, &[]));
    let given = world.run(pod("r", "w", &[("main", share(30, 20))]), &[]).unwrap();
    assert!(given["main"].mounts.is_empty());
    assert_eq!(world.events[0].0, "ShareNotEnforced");
    assert!(
        world.events[0]
            .1
            .contains("not held to its share of the GPU: the library libtessera.so cannot be read")
    );
}

#[test]
fn with_share_mode_off_only_whole_gpus_are_served() {
    let mut world = World::new();
    world.settings.isolation.serve_shares = false;
    world.settings.isolation.without_library = WithoutLibrary::Serve;
    world.restart_agent();
    let refused = world.run(pod("p", "p", &[("main", share(30, 20))]), &[]).unwrap_err();
    assert!(
        refused.to_string().contains("share mode is not enabled on this node (--share-mode=false)"),
        "{refused}"
    );
    world.run(pod("q", "q", &[("main", whole(1))]), &[]).unwrap();
    // With gpu-manager, a pod with a share fails for good on such a node. Here the scheduler keeps it away.
    assert!(publishes_whole_gpus_only(&mut world, &[]));
}

/// Shows the agent a new node object with these labels. Returns whether the agent publishes that the node serves no
/// shares.
fn publishes_whole_gpus_only(world: &mut World, labels: &[(&str, &str)]) -> bool {
    let mut node = Node::default();
    let label = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    node.metadata.labels = labels.iter().map(label).collect();
    world.event(Event::NodePatched(Ok(())));
    let actions = world.agent.handle(EventTime::default(), Event::Node(Box::new(node)));
    let patch = actions.iter().find_map(|action| match action {
        Action::PatchNode(patch) => Some(patch),
        _ => None,
    });
    patch.unwrap().annotations["tessera.dev/inventory"].contains(r#""wholeGpusOnly":true"#)
}

/// gpu-manager refuses such a pod too, but only when its container registers.
#[test]
fn a_ceiling_that_is_no_number_is_refused_and_reported() {
    let mut world = World::new();
    let mut with_ceiling = pod("p", "u", &[("main", share(30, 20))]);
    with_ceiling.metadata.annotations.insert("tencent.com/vcuda-core-limit".into(), "abc".into());
    let refused = world.run(with_ceiling, &[]).unwrap_err();
    let message = "tencent.com/vcuda-core-limit: found \"abc\"; write a percentage of one GPU, such as 80";
    assert!(refused.to_string().contains(message), "{refused}");
    assert_eq!(world.events, [("AnnotationNotUnderstood", message.to_owned())]);
}

/// The owner of a pod writes as many annotations as fit into an object, and changes them again and again.
#[test]
fn bad_annotations_of_one_pod_cause_a_bounded_number_of_events() {
    let mut world = World::new();
    let mut odd = pod("p", "u", &[("main", memory(1))]);
    for index in 0..2_000 {
        odd.metadata.annotations.insert(format!("tencent.com/predicate-gpu-idx-{index}"), "x".repeat(100));
    }
    world.run(odd.clone(), &[]).unwrap();
    for change in 0..200 {
        odd.metadata.annotations.insert("tessera.dev/policy".into(), format!("wrong-{change}"));
        world.event(Event::PodApplied(Box::new(odd.clone())));
    }
    let about = |(reason, _): &&(_, String)| *reason == "AnnotationNotUnderstood";
    assert_eq!(world.events.iter().filter(about).count(), 64);
}

#[test]
fn every_annotation_that_cannot_be_understood_is_reported_once() {
    let mut world = World::new();
    let mut odd = pod("p", "u", &[("main", memory(1))]);
    for (key, value) in [
        ("tessera.dev/policy", "dynamic"),
        ("tessera.dev/traffic", "much"),
        ("tessera.dev/isolation", "no"),
        ("ALIYUN_COM_GPU_ASSIGNED", "yes"),
        ("ALIYUN_COM_GPU_ASSUME_TIME", "now"),
        ("ALIYUN_COM_GPU_GROUP", "0;1"),
        ("ALIYUN_COM_GPU_MEM_ASSIGNED", "1"),
        ("ALIYUN_COM_GPU_MEM_ASSUME_TIME", "2026-11-19"),
        ("ALIYUN_COM_GPU_MEM_DEV", "16GiB"),
        ("ALIYUN_COM_GPU_MEM_IDX", "first"),
        ("ALIYUN_COM_GPU_MEM_POD", "-4"),
        ("scheduler.framework.gpushare.allocation", "[]"),
        ("tencent.com/gpu-assigned", "maybe"),
        ("tencent.com/predicate-gpu-idx-0", "a"),
        ("tencent.com/predicate-gpu-idx-1", "b"),
        ("tencent.com/predicate-gpu-idx-main", "0"),
        ("tencent.com/predicate-time", "late"),
    ] {
        odd.metadata.annotations.insert(key.into(), value.into());
    }
    world.run(odd.clone(), &[]).unwrap();
    world.event(Event::PodApplied(Box::new(odd)));
    let keys: Vec<&str> = world.events.iter().filter_map(|(_, text)| Some(text.split_once(':')?.0)).collect();
    let expected = [
        "tessera.dev/policy",
        "tessera.dev/traffic",
        "tessera.dev/isolation",
        "ALIYUN_COM_GPU_ASSIGNED",
        "ALIYUN_COM_GPU_ASSUME_TIME",
        "ALIYUN_COM_GPU_GROUP",
        "ALIYUN_COM_GPU_MEM_ASSIGNED",
        "ALIYUN_COM_GPU_MEM_ASSUME_TIME",
        "ALIYUN_COM_GPU_MEM_DEV",
        "ALIYUN_COM_GPU_MEM_IDX",
        "ALIYUN_COM_GPU_MEM_POD",
        "scheduler.framework.gpushare.allocation",
        "tencent.com/gpu-assigned",
        "tencent.com/predicate-gpu-idx-0",
        "tencent.com/predicate-gpu-idx-1",
        "tencent.com/predicate-gpu-idx-main",
        "tencent.com/predicate-time",
    ];
    assert_eq!(keys, expected);
    assert!(
        world.events.iter().all(|(reason, _)| *reason == "AnnotationNotUnderstood"),
        "{:?}",
        world.events
    );
}

#[test]
fn a_pod_opts_out_only_if_the_node_allows_it() {
    let mut world = World::new();
    let asking = |name: &str| {
        let mut pod = pod(name, name, &[("main", memory(1))]);
        pod.metadata.annotations.insert("tessera.dev/isolation".into(), "off".into());
        pod
    };
    let given = world.run(asking("p"), &[]).unwrap();
    assert_eq!(given["main"].mounts.len(), 4);
    assert_eq!(world.events[0].0, "OptOutNotAllowed");
    world.settings.isolation.allow_opt_out = true;
    world.restart_agent();
    let given = world.run(asking("q"), &[]).unwrap();
    assert!(given["main"].mounts.is_empty());
    assert_eq!(world.events.len(), 1);
}

/// An owner that annotates a running pod, restarts the container or waits for another agent gets no
/// more than what was granted.
#[test]
fn a_running_pod_cannot_lift_its_ceiling() {
    let mut world = World::new();
    let mut with_ceiling = pod("p", "u", &[("main", share(30, 20))]);
    with_ceiling.metadata.annotations.insert("tencent.com/vcuda-core-limit".into(), "50".into());
    world.run(with_ceiling, &[("main", &[2])]).unwrap();
    let ceiling =
        |world: &World| world.limits[&("u".to_owned(), "main".to_owned())].gpus[0].compute_ceiling_percent;
    assert_eq!(ceiling(&world), 50, "the annotation at creation counts");
    let pod = world.pods.get_mut("u").unwrap();
    pod.metadata.annotations.insert("tencent.com/vcuda-core-limit".into(), "100".into());
    let pod = pod.clone();
    world.event(Event::PodApplied(Box::new(pod)));
    assert_eq!(ceiling(&world), 50, "while it runs");
    world.start("u").unwrap();
    assert_eq!(ceiling(&world), 50, "after a restart of the container");
    world.restart_agent();
    world.start("u").unwrap();
    assert_eq!(ceiling(&world), 50, "after a restart of the agent");
    world.settings.isolation.allow_ceiling_changes = true;
    world.restart_agent();
    assert_eq!(ceiling(&world), 100, "unless the agent allows it");
    world.check();
}

#[test]
fn limits_follow_the_ceiling_while_the_container_runs_and_after_a_restart() {
    let mut world = World::new();
    world.settings.isolation.allow_ceiling_changes = true;
    world.restart_agent();
    world.run(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    world.run(pod("q", "v", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    let ceiling = |world: &World, uid: &str| {
        world.limits[&(uid.to_owned(), "main".to_owned())].gpus[0].compute_ceiling_percent
    };
    let set = |world: &mut World, text: &str| {
        let pod = world.pods.get_mut("u").unwrap();
        pod.metadata.annotations.insert("tencent.com/vcuda-core-limit".into(), text.into());
        let pod = pod.clone();
        world.event(Event::PodApplied(Box::new(pod)));
    };
    set(&mut world, "80");
    assert_eq!((ceiling(&world, "u"), ceiling(&world, "v")), (80, 30));
    set(&mut world, "10");
    assert_eq!(ceiling(&world, "u"), 30, "the ceiling is never below the guaranteed share");
    world.settings.isolation.meaning = tessera_limits::limits::ShareMeaning::Throughput;
    world.restart_agent();
    assert!(world.limits.values().all(|limits| limits.meaning == world.settings.isolation.meaning));
    // Limits without GPUs stand for a damaged file, which the next agent writes again.
    world.limits.get_mut(&("v".to_owned(), "main".to_owned())).unwrap().gpus.clear();
    world.restart_agent();
    assert_eq!(ceiling(&world, "v"), 30);
    world.check();
}

#[test]
fn an_admission_needs_one_list_per_container() {
    let mut world = World::new();
    let first = world.bind(pod("p", "u", &[("main", share(30, 20)), ("second", share(10, 10))]), &[]);
    let before = world.lists;
    world.admit(&first).unwrap();
    assert_eq!(world.lists - before, 2, "only the first call for each of two containers needs a list");
}

/// The kubelet rejects the first pod halfway, for lack of another resource, and admits the next.
#[test]
fn an_aborted_admission_does_not_affect_the_next_pod() {
    let rdma = |mut limits: Vec<(&'static str, String)>| {
        limits.push(("rdma/hca", "1".to_owned()));
        limits
    };
    let two = [("main", memory(2)), ("second", memory(2))];
    let mixed = [("main", rdma(share(30, 20)))];
    for (containers, resource) in [(&two[..], "aliyun.com/gpu-mem"), (&mixed[..], "tencent.com/vcuda-core")] {
        for seed in 0..8 {
            let mut world = World::new();
            world.seed(seed);
            let gpus: Vec<(&str, &[u8])> = containers.iter().map(|(name, _)| (*name, &[1u8][..])).collect();
            let first = world.bind(pod("first", "first", containers), &gpus);
            let next = world.bind(pod("next", "next", &containers[..1]), &[("main", &[2])]);
            world.admit_only(&first, resource);
            let given = world.admit(&next).unwrap();
            assert_eq!(world.gpus_of("next", "main"), [2].into(), "seed {seed}");
            let mounts = &given["main"].mounts;
            assert!(mounts.iter().all(|mount| !mount.host_path.contains("first")), "{mounts:?}");
        }
    }
}

#[test]
fn equal_pods_admitted_in_another_order_keep_their_gpus() {
    let mut world = World::new();
    let pods: Vec<_> = (0..4u8)
        .map(|gpu| {
            let name = format!("p{gpu}");
            world.bind(pod(&name, &name, &[("main", share(60, 20))]), &[("main", &[gpu])])
        })
        .collect();
    for pod in pods.iter().rev() {
        world.admit(pod).unwrap();
        world.start(&pod.metadata.uid).unwrap();
    }
    for gpu in 0..4u8 {
        assert_eq!(world.gpus_of(&format!("p{gpu}"), "main"), [gpu].into());
    }
    world.check();
}

#[test]
fn a_pod_without_a_grant_is_served_and_annotated() {
    let mut world = World::new();
    world.run(pod("p", "u", &[("main", memory(4))]), &[]).unwrap();
    let annotations = &world.pods["u"].metadata.annotations;
    assert!(annotations["tessera.dev/grant"].contains("memoryMiB\":4096"));
    assert_ne!(annotations["ALIYUN_COM_GPU_MEM_IDX"], "-1");
    world.check();
}

/// The documents of gputopology tell pods that its scheduler placed by this annotation.
#[test]
fn only_pods_that_a_scheduler_placed_are_marked_as_assigned() {
    let mut world = World::new();
    world.run(pod("bypassed", "b", &[("main", memory(4))]), &[]).unwrap();
    world.run(pod("whole", "w", &[("main", whole(1))]), &[]).unwrap();
    for uid in ["b", "w"] {
        let annotations = &world.pods[uid].metadata.annotations;
        assert!(annotations.contains_key("tessera.dev/grant"), "{annotations:?}");
        assert!(annotations.keys().all(|key| !key.ends_with("_ASSIGNED")), "{annotations:?}");
    }
    for (uid, request, key) in
        [("s", memory(4), "ALIYUN_COM_GPU_MEM_ASSIGNED"), ("g", whole(1), "ALIYUN_COM_GPU_ASSIGNED")]
    {
        world.run(pod(uid, uid, &[("main", request)]), &[("main", &[3 + u8::from(uid == "g")])]).unwrap();
        assert_eq!(world.pods[uid].metadata.annotations[key], "true");
    }
}

#[test]
fn a_reserved_gpu_is_not_given_to_a_pod_without_a_grant() {
    let mut world = World::new();
    for gpu in 0..4u8 {
        let name = format!("granted{gpu}");
        world.bind(pod(&name, &name, &[("main", whole(1))]), &[("main", &[gpu])]);
    }
    let refused = world.run(pod("late", "late", &[("main", memory(1))]), &[]).unwrap_err().to_string();
    assert!(refused.contains("no GPU with 1024 MiB left"), "{refused}");
}

/// The scheduler does not choose a cordoned GPU. A pod with a `nodeName` bypasses it.
#[test]
fn a_cordoned_gpu_is_not_given_to_a_pod_without_a_grant() {
    let mut world = World::new();
    let cordoned: Vec<String> = found().gpus.iter().skip(1).map(|gpu| gpu.uuid.0.to_string()).collect();
    let mut node = Node::default();
    node.metadata.annotations.insert("tessera.dev/gpu-cordon".to_owned(), cordoned.join(","));
    world.event(Event::Node(Box::new(node)));
    assert_eq!(world.agent.view().cordoned, [1, 2, 3], "the metrics show these GPUs as cordoned");
    world.run(pod("first", "first", &[("main", whole(1))]), &[]).unwrap();
    assert_eq!(world.gpus_of("first", "main"), [0].into());
    let refused = world.run(pod("late", "late", &[("main", memory(1))]), &[]).unwrap_err().to_string();
    assert!(refused.contains("no GPU with 1024 MiB left"), "{refused}");
    // The scheduler decided before the cordon.
    world.run(pod("granted", "granted", &[("main", whole(1))]), &[("main", &[2])]).unwrap();
    world.check();
}

#[test]
fn whole_gpus_and_shares_are_never_on_the_same_gpu() {
    let mut world = World::new();
    world.run(pod("share", "share", &[("main", share(10, 1))]), &[("main", &[1])]).unwrap();
    world.run(pod("whole", "whole", &[("main", whole(3))]), &[]).unwrap();
    assert_eq!(world.gpus_of("whole", "main"), [0, 2, 3].into());
    let refused = world.run(pod("more", "more", &[("main", whole(1))]), &[]).unwrap_err().to_string();
    assert!(refused.contains("fewer than 1 idle GPU"), "{refused}");
    world.check();
}

#[test]
fn whole_gpus_by_compute_percent_may_request_some_memory_too() {
    for seed in 0..8 {
        let mut world = World::new();
        world.seed(seed);
        world.run(pod("p", "u", &[("main", share(200, 3))]), &[("main", &[1, 3])]).unwrap();
        assert_eq!(world.gpus_of("u", "main"), [1, 3].into());
        world.check();
    }
}

#[test]
fn init_containers_sidecars_and_mains_get_their_granted_gpus() {
    for seed in 0..8 {
        let mut world = World::new();
        world.seed(seed);
        let containers = [
            ("init-load", share(20, 30)),
            ("side-car", share(10, 10)),
            ("first", share(30, 20)),
            ("second", share(60, 20)),
        ];
        let grants: &[(&str, &[u8])] =
            &[("init-load", &[1]), ("side-car", &[1]), ("first", &[1]), ("second", &[3])];
        world.run(pod("p", "u", &containers), grants).unwrap();
        assert_eq!(world.gpus_of("u", "init-load"), [1].into());
        assert_eq!(world.gpus_of("u", "first"), [1].into());
        assert_eq!(world.gpus_of("u", "second"), [3].into());
        assert_eq!(world.limits.len(), 4);
        world.check();
    }
}

#[test]
fn a_pod_whose_init_container_alone_requests_gpus_is_not_mistaken_for_another() {
    let mut world = World::new();
    world.run(pod("early", "early", &[("init-load", share(30, 20)), ("main", vec![])]), &[]).unwrap();
    // The kubelet never lists the first pod's devices, and the second pod requests the same.
    world.run(pod("p", "u", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    assert_eq!(world.gpus_of("u", "main"), [2].into());
    world.check();
}

#[test]
fn an_init_container_starts_after_the_agent_has_restarted() {
    for main in [vec![], share(10, 10), share(60, 40)] {
        let mut world = World::new();
        let containers = [("init-load", share(30, 20)), ("main", main.clone())];
        let pod = world.bind(pod("p", "u", &containers), &[("init-load", &[2]), ("main", &[2])]);
        world.admit(&pod).unwrap();
        world.restart_agent();
        world.start("u").unwrap();
        assert_eq!(
            world.limits[&("u".to_owned(), "init-load".to_owned())].gpus[0].compute_percent,
            30,
            "{main:?}"
        );
        world.check();
    }
}

/// A kubelet that is asked for its podresources while it waits for an answer forgets which devices it has reserved, and
/// offers them to the next pod.
#[test]
fn devices_that_a_kubelet_offers_twice_are_given_once() {
    for resources in [share(30, 20), vec![("aliyun.com/gpu-mem", "4".to_owned())]] {
        let mut world = World::new();
        let pods = ["p", "q"]
            .map(|name| world.bind(pod(name, name, &[("main", resources.clone())]), &[("main", &[2])]));
        world.admit(&pods[0]).unwrap();
        let forgotten = world.kubelet.remove("p").unwrap();
        world.admit(&pods[1]).unwrap();
        world.kubelet.insert("p".to_owned(), forgotten);
        let held = ["p", "q"].map(|uid| world.kubelet[uid].1[0].2.clone());
        for (resource, ids) in &held[0] {
            assert!(ids.is_disjoint(&held[1][resource]), "{resource}: {held:?}");
        }
        for uid in ["p", "q"] {
            world.start(uid).unwrap();
        }
        world.check();
    }
}

#[test]
fn an_init_container_that_may_belong_to_two_pods_does_not_start() {
    let mut world = World::new();
    for name in ["p", "q"] {
        let pod = world.bind(pod(name, name, &[("init-load", share(30, 20))]), &[("init-load", &[2])]);
        world.admit(&pod).unwrap();
    }
    world.restart_agent();
    let refused = world.start("p").unwrap_err().to_string();
    assert!(refused.contains("several pods seem to hold these"), "{refused}");
}

#[test]
fn bad_requests_are_refused_with_a_remedy() {
    let mut world = World::new();
    for (limits, words) in [
        (share(150, 0), "write 100 or 200 for whole GPUs"),
        (vec![("tencent.com/vcuda-core", "50".to_owned())], "needs memory; add tencent.com/vcuda-memory"),
        (memory(17), "no GPU has 17408 MiB"),
    ] {
        let refused = world.run(pod("p", words, &[("main", limits)]), &[]).unwrap_err().to_string();
        assert!(refused.contains(words), "{refused}");
        world.remove(words);
    }
}

#[test]
fn an_ended_pod_frees_its_gpu_and_a_terminating_one_does_not() {
    let mut world = World::new();
    world.run(pod("p", "u", &[("main", whole(4))]), &[]).unwrap();
    // The first pod is terminating: API server and kubelet still have it.
    let one = vec![("nvidia.com/gpu", "1".to_owned())];
    let refused = world.run(pod("q", "v", &[("main", one)]), &[]).unwrap_err().to_string();
    assert!(refused.contains("fewer than 1 idle GPU"), "{refused}");
    world.set_status("u", "Succeeded", true);
    world.kubelet.remove("u");
    world.run(pod("r", "w", &[("main", whole(1))]), &[]).unwrap();
    world.check();
}

#[test]
fn a_pod_is_not_refused_because_the_watch_lags_behind() {
    let mut world = World::new();
    world.run(pod("p", "u", &[("main", whole(4))]), &[]).unwrap();
    // The scheduler and the kubelet know that the pod has ended. The agent's watch does not yet.
    world.kubelet.remove("u");
    world.pods.get_mut("u").unwrap().status.phase = "Succeeded".into();
    world.run(pod("q", "v", &[("main", share(30, 20))]), &[("main", &[2])]).unwrap();
    assert_eq!(world.gpus_of("v", "main"), [2].into());
    world.check();
}

#[test]
fn a_new_pod_of_the_same_name_does_not_get_the_gpu_of_the_old_one() {
    let mut world = World::new();
    world.run(pod("p", "old", &[("main", share(80, 20))]), &[("main", &[1])]).unwrap();
    // The pod was deleted by force: the API server has forgotten it, the kubelet has not.
    world.pods.remove("old");
    world.event(Event::PodDeleted("old".into()));
    world.run(pod("p", "new", &[("main", share(80, 20))]), &[("main", &[1])]).unwrap();
    assert_ne!(world.gpus_of("new", "main"), [1].into(), "the old pod still uses GPU 1");
    world.kubelet.remove("old");
    world.check();
}

#[test]
fn a_broken_gpu_is_not_given_to_pods() {
    let mut world = World::new();
    let uuid = found().gpus[0].uuid.clone();
    world.event(Event::Incident(Incident { gpu: Some(uuid.clone()), kind: IncidentKind::Xid(79) }));
    world.run(pod("p", "u", &[("main", whole(3))]), &[]).unwrap();
    assert_eq!(world.gpus_of("u", "main"), [1, 2, 3].into());
    let refused =
        world.run(pod("q", "v", &[("main", share(10, 10))]), &[("main", &[0])]).unwrap_err().to_string();
    assert!(refused.contains("left"), "{refused}");
    let told = format!(
        "a GPU is out of use until the driver finds it again or the agent restarts gpu={uuid} detail=XID 79"
    );
    assert!(world.warnings.contains(&told), "{:?}", world.warnings);
}

#[test]
fn a_restarted_agent_knows_the_same_holdings() {
    let mut world = World::new();
    world.run(pod("p", "u", &[("main", share(60, 20))]), &[("main", &[2])]).unwrap();
    world.run(pod("q", "v", &[("main", whole(1))]), &[]).unwrap();
    world.check();
    let before: Vec<_> =
        world.agent.view().containers.iter().map(|c| (c.uid.clone(), c.gpus.clone())).collect();
    world.restart_agent();
    world.check();
    let after: Vec<_> =
        world.agent.view().containers.iter().map(|c| (c.uid.clone(), c.gpus.clone())).collect();
    assert_eq!(before, after);
    // A container that starts again needs nothing but the kubelet's list.
    world.start("u").unwrap();
}

#[test]
fn without_the_api_server_containers_restart_and_annotations_follow_later() {
    let mut world = World::new();
    world.run(pod("p", "u", &[("main", share(60, 20))]), &[("main", &[2])]).unwrap();
    world.run(pod("q", "v", &[("main", whole(1))]), &[]).unwrap();
    world.run(pod("r", "w", &[("main", share(100, 8))]), &[]).unwrap();
    world.api_is_up = false;
    world.start("u").unwrap();
    world.restart_agent();
    for uid in ["u", "v", "w"] {
        world.start(uid).unwrap();
    }
    world.api_is_up = true;
    world.restart_agent();
    world.check();
}

#[test]
fn the_node_is_patched_once_and_again_after_its_values_were_removed() {
    let mut world = World::new();
    world.event(Event::Node(Box::default()));
    for _ in 0..3 {
        world.event(Event::Tick);
    }
    assert_eq!(world.node_patches, 1, "the watch has not shown the patch yet");
    // A kubelet that lost its checkpoint has zeroed the resources it does not know.
    world.event(Event::Node(Box::default()));
    assert_eq!(world.node_patches, 2);
}

#[test]
fn devices_of_two_gpus_are_refused_for_one_share() {
    use std::collections::BTreeSet;

    use tessera_wire::kubelet::device_id::Resource;

    use crate::controller::{CallAnswer, CallId};
    let mut world = World::new();
    let bound = world.bind(pod("p", "u", &[("main", memory(2))]), &[]);
    let entry = tessera_node::pod_resources::PodDevices {
        namespace: "team".into(),
        name: "p".into(),
        containers: vec![tessera_node::pod_resources::ContainerDevices {
            name: "main".into(),
            ..Default::default()
        }],
    };
    let now = EventTime::default();
    let ids: BTreeSet<String> = ["00000000-1", "00000001-1"].map(str::to_owned).into();
    world.agent.handle(now, Event::Allocate(CallId(900), Resource::GpuMemory, ids));
    world.agent.handle(now, Event::PodResourcesListed(Ok(vec![entry])));
    let later = EventTime { elapsed: std::time::Duration::from_secs(1), ..now };
    assert!(
        world.agent.handle(later, Event::Tick).contains(&Action::ReadPods),
        "the pods are read before the call is refused"
    );
    let actions = world.agent.handle(later, Event::PodsRead(Ok(vec![bound.clone()])));
    let refused = actions.iter().find_map(|action| match action {
        Action::Answer(CallId(900), CallAnswer::Allocated(Err(reason))) => Some(reason.to_string()),
        _ => None,
    });
    assert!(refused.unwrap().contains("which do not make 1 GPU"), "{}", bound.metadata.name);
}
