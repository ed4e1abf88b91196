//! Bind: bookings are made once, confirmed by the watch, and rolled back when the Binding fails.

use serde_json::{Value, json};
use tessera_core::units::PodUid;
use tessera_scheduler::state::{
    BindOrder, BindOutcome, BindStep, SchedulerSettings, ServedSchedulers, State, StateEvent, WatchEvent,
};

use crate::fixtures::*;

#[test]
fn every_dialect_is_filtered_bound_and_booked_in_one_ledger() {
    let mut state = state(&[node("n", 2, "GiB")]);
    let keys =
        |pod: &Value| pod["metadata"]["annotations"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let vcuda = bind(&mut state, &share("vcuda", 30), "n");
    assert!(keys(&vcuda).contains(&"tencent.com/predicate-gpu-idx-0".to_owned()));
    let memory = bind(&mut state, &pod("memory", &[("aliyun.com/gpu-mem", "8")]), "n");
    assert_eq!(memory["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_POD"], "8");
    // Both pods share the first GPU, so the second GPU is still idle.
    let topology = bind(&mut state, &pod("topology", &[("aliyun.com/gpu", "1")]), "n");
    assert_eq!(topology["metadata"]["annotations"]["ALIYUN_COM_GPU_GROUP"], "1");
    let refused = filter(&state, &whole("nvidia", 1), &["n"]);
    assert_eq!(refused.failed_nodes["n"], "fewer than 1 idle GPU");
    let vcuda_whole = pod("vcuda-whole", &[("tencent.com/vcuda-core", "100")]);
    assert_eq!(filter(&state, &vcuda_whole, &["n"]).failed_nodes["n"], "fewer than 1 idle GPU");
    assert!(filter(&state, &share("other", 70), &["n"]).failed_nodes["n"].starts_with("no GPU with 70%"));
    assert_eq!(filter(&state, &share("small", 20), &["n"]).node_names.unwrap(), ["n"]);
}

#[test]
fn a_bind_is_idempotent_and_no_gpu_is_granted_twice() {
    let mut state = state(&[node("n", 1, "GiB"), node("m", 1, "GiB")]);
    let (first, second) = (whole("first", 1), whole("second", 1));
    set_pod(&mut state, &first);
    set_pod(&mut state, &second);
    let step = state.begin_bind(&bind_args(&first, "n"), at(0)).unwrap();
    assert_eq!(state.begin_bind(&bind_args(&first, "n"), at(1)).unwrap(), step, "the same again");
    let busy = state.begin_bind(&bind_args(&first, "m"), at(1)).unwrap_err().to_string();
    assert_eq!(busy, "pod uid-first is being bound to node n by another call");
    let taken = state.begin_bind(&bind_args(&second, "n"), at(1)).unwrap_err().to_string();
    assert_eq!(taken, "node n: fewer than 1 idle GPU");
    // One of the two attempts is refused because the other succeeded.
    state.end_bind(&PodUid::from("uid-first"), BindOutcome::Bound, at(2));
    state.end_bind(&PodUid::from("uid-first"), BindOutcome::Refused, at(2));
    assert_eq!(state.begin_bind(&bind_args(&first, "n"), at(3)).unwrap(), BindStep::Done);
    assert!(state.begin_bind(&bind_args(&second, "n"), at(3)).is_err());
    assert_eq!(state.begin_bind(&bind_args(&whole("unseen", 1), "m"), at(3)).unwrap(), BindStep::Fetch);
}

#[test]
fn a_refused_binding_is_rolled_back_and_an_uncertain_one_keeps_its_gpu() {
    let mut state = state(&[node("n", 1, "GiB"), node("m", 1, "GiB")]);
    let (first, second) = (whole("first", 1), whole("second", 1));
    set_pod(&mut state, &first);
    set_pod(&mut state, &second);
    let uid = PodUid::from("uid-first");
    state.begin_bind(&bind_args(&first, "n"), at(0)).unwrap();
    state.end_bind(&uid, BindOutcome::Refused, at(0));
    assert_eq!(state.rolled_back(), 1);
    assert_eq!(filter(&state, &second, &["n"]).node_names.unwrap(), ["n"]);
    state.begin_bind(&bind_args(&first, "n"), at(1)).unwrap();
    state.end_bind(&uid, BindOutcome::Unknown, at(1));
    assert!(filter(&state, &second, &["n"]).node_names.unwrap().is_empty());
    // kube-scheduler may try another node meanwhile; then both GPUs stay reserved.
    state.begin_bind(&bind_args(&first, "m"), at(2)).unwrap();
    assert!(filter(&state, &second, &["n", "m"]).node_names.unwrap().is_empty());
    state.end_bind(&uid, BindOutcome::Refused, at(3));
    assert_eq!(filter(&state, &second, &["n", "m"]).node_names.unwrap(), ["m"]);
    assert!(state.uncertain_bindings(at(60)).is_empty());
    assert_eq!(filter(&state, &second, &["n", "m"]).node_names.unwrap(), ["m"]);
    for doubt in state.uncertain_bindings(at(100)) {
        state.resolve_uncertain(&doubt, Some(parse(&first)), at(100));
    }
    assert_eq!(filter(&state, &second, &["n", "m"]).node_names.unwrap(), ["n", "m"]);
}

/// The agent withdraws the devices of other dialects while a pod holds a GPU, and the kubelet learns a moment after the
/// pod's end that they are back.
#[test]
fn a_gpu_that_changes_dialect_is_bound_a_moment_after_its_release() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let order = |state: &mut State, pod: &Value, now| {
        set_pod(state, pod);
        match state.begin_bind(&bind_args(pod, "n"), at(now)).unwrap() {
            BindStep::Send(order) => order,
            other => panic!("{other:?}"),
        }
    };
    let end = |state: &mut State, pod: &Value, now| {
        let mut ended = pod.clone();
        ended["spec"]["nodeName"] = json!("n");
        ended["status"]["phase"] = json!("Succeeded");
        state.set_event_time(at(now));
        set_pod(state, &ended);
    };
    let (first, second, third) = (share("first", 60), whole("second", 1), whole("third", 1));
    assert_eq!(order(&mut state, &first, 10).not_before, None, "an idle GPU");
    end(&mut state, &first, 20);
    assert_eq!(order(&mut state, &second, 20).not_before, Some(at(21).steady));
    end(&mut state, &second, 30);
    assert_eq!(order(&mut state, &third, 30).not_before, None, "the same dialect");
    end(&mut state, &third, 40);
    assert_eq!(order(&mut state, &share("fourth", 60), 41).not_before, None, "a second later");
}

/// The agent withdraws the devices of a cordoned GPU from all dialects.
#[test]
fn a_gpu_is_bound_a_moment_after_it_is_uncordoned() {
    let mut state = state(&[]);
    let mut cordoned = node("n", 2, "GiB");
    cordoned["metadata"]["annotations"]["tessera.dev/gpu-cordon"] = "GPU-n-0".into();
    state.set_event_time(at(10));
    set_node(&mut state, &cordoned);
    let order = |state: &mut State, name: &str, now| {
        let pod = whole(name, 1);
        set_pod(state, &pod);
        match state.begin_bind(&bind_args(&pod, "n"), at(now)).unwrap() {
            BindStep::Send(order) => order,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(order(&mut state, "first", 10).not_before, None, "the other GPU");
    cordoned["metadata"]["annotations"].as_object_mut().unwrap().remove("tessera.dev/gpu-cordon");
    state.set_event_time(at(20));
    set_node(&mut state, &cordoned);
    assert_eq!(order(&mut state, "second", 20).not_before, Some(at(21).steady));
}

/// The watch has shown the pods, so they are not read again when they are bound.
#[test]
fn pods_of_other_schedulers_are_not_bound() {
    let served = |names: &[&str]| ServedSchedulers(names.iter().map(|name| (*name).to_owned()).collect());
    let bind = |served: ServedSchedulers, scheduler: Value| {
        let mut state = State::new(SchedulerSettings { served, ..SchedulerSettings::default() });
        set_node(&mut state, &node("n", 1, "GiB"));
        let mut pod = whole("p", 1);
        pod["spec"]["schedulerName"] = scheduler;
        set_pod(&mut state, &pod);
        state.begin_bind(&bind_args(&pod, "n"), at(0)).map_err(|refused| refused.to_string())
    };
    let refusal = bind(ServedSchedulers::default(), "volcano".into()).unwrap_err();
    assert!(refusal.contains("scheduled by volcano, which this extender does not serve"), "{refusal}");
    for scheduler in [json!("tessera"), json!("default-scheduler"), Value::Null] {
        assert!(matches!(bind(ServedSchedulers::default(), scheduler), Ok(BindStep::Send(_))));
    }
    assert!(matches!(bind(served(&["tessera"]), "tessera".into()), Ok(BindStep::Send(_))));
    assert!(bind(served(&["tessera"]), "default-scheduler".into()).is_err());
}

#[test]
fn a_pod_with_gpus_is_never_bound_without_a_booking() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let pod = whole("p", 1);
    state.apply_read(parse(&pod), state.list_generation());
    state.handle(StateEvent::Pod(WatchEvent::Listing));
    state.handle(StateEvent::Pod(WatchEvent::Listed));
    // The list was older than the pod. A read of the pod may be older still.
    let args = bind_args(&pod, "n");
    assert_eq!(state.begin_bind(&args, at(0)).unwrap(), BindStep::Fetch);
    let refused = state.begin_bind_with(parse(&pod), state.list_generation(), &args, at(0)).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "pod uid-p is not in the list of pods yet; kube-scheduler retries after the watch has shown it"
    );
    set_pod(&mut state, &pod);
    assert!(matches!(state.begin_bind(&args, at(1)), Ok(BindStep::Send(_))));
    // A pod that names a GPU resource with the amount 0 needs no booking.
    let zero = self::pod("zero", &[("nvidia.com/gpu", "0")]);
    let order = state.begin_bind_with(parse(&zero), state.list_generation(), &bind_args(&zero, "n"), at(1));
    assert_eq!(order.unwrap(), Some(BindOrder::default()));
}

#[test]
fn a_pod_missing_in_the_list_is_dropped_with_its_booking() {
    let mut state = state(&[node("n", 1, "GiB")]);
    let (pod, uid) = (whole("p", 1), PodUid::from("uid-p"));
    state.apply_read(parse(&pod), state.list_generation());
    state.begin_bind(&bind_args(&pod, "n"), at(0)).unwrap();
    state.handle(StateEvent::Pod(WatchEvent::Listing));
    state.handle(StateEvent::Pod(WatchEvent::Listed));
    assert!(state.is_waiting(&uid), "it may have been made after the list");
    state.end_bind(&uid, BindOutcome::Refused, at(1));
    assert!(!state.is_waiting(&uid));
    // The watch shows the pod after all.
    set_pod(&mut state, &pod);
    state.begin_bind(&bind_args(&pod, "n"), at(2)).unwrap();
    state.handle(StateEvent::Pod(WatchEvent::Listing));
    state.handle(StateEvent::Pod(WatchEvent::Listed));
    set_pod(&mut state, &pod);
    state.end_bind(&uid, BindOutcome::Refused, at(3));
    assert!(state.is_waiting(&uid));
}

#[test]
fn a_pod_that_the_watch_has_shown_outlives_its_booking_in_doubt() {
    let mut state = state(&[node("a", 1, "GiB"), node("b", 1, "GiB")]);
    let (pod, uid) = (whole("p", 1), PodUid::from("uid-p"));
    // The pod is newer than the list.
    state.apply_read(parse(&pod), state.list_generation());
    state.begin_bind(&bind_args(&pod, "a"), at(0)).unwrap();
    state.end_bind(&uid, BindOutcome::Unknown, at(0));
    state.handle(StateEvent::Pod(WatchEvent::Listing));
    state.handle(StateEvent::Pod(WatchEvent::Listed));
    state.begin_bind(&bind_args(&pod, "b"), at(90)).unwrap();
    set_pod(&mut state, &pod);
    for doubt in state.uncertain_bindings(at(91)) {
        state.resolve_uncertain(&doubt, Some(parse(&pod)), at(91));
    }
    // The Binding to node b is still in flight.
    assert!(state.is_waiting(&uid));
    assert_eq!(filter(&state, &whole("other", 1), &["a", "b"]).node_names.unwrap(), ["a"]);
}
