//! Claims of dynamic resource allocation: what they hold, how they are booked and corrected when their pods are bound.

use proptest::prelude::*;
use serde_json::{Value, json};
use tessera_core::claim::Replacement;
use tessera_core::quota::{NamespaceLimit, Quota};
use tessera_core::units::GpuIndex;
use tessera_scheduler::dashboard::AgentReader;
use tessera_scheduler::metrics::Metrics;
use tessera_scheduler::run::Membership;
use tessera_scheduler::state::{
    ClaimOutcome, ClaimPlan, ClaimRefusal, SchedulerSettings, State, StateEvent, Timestamp, WatchEvent,
};
use tessera_scheduler::verb::filter::PassOn;
use tessera_sim::apiserver::ApiServer;
use tessera_wire::foreign::dra::ResourceClaim;
use tessera_wire::metrics::Format;

use crate::fixtures::*;
use crate::server::{Replica, eventually, told};

const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims";

fn settings() -> SchedulerSettings {
    SchedulerSettings { dra: true, pass_on: PassOn::All, ..SchedulerSettings::default() }
}

pub(crate) fn class() -> Value {
    let selector = json!({"cel": {"expression": "device.driver == \"gpu.tessera.dev\""}});
    json!({"metadata": {"name": "tessera"}, "spec": {"selectors": [selector]}})
}

fn state_with(nodes: &[Value]) -> State {
    let mut state = State::new(settings());
    nodes.iter().for_each(|node| set_node(&mut state, node));
    state.handle(StateEvent::Class(WatchEvent::Set(serde_json::from_value(class()).unwrap())));
    state
}

/// Returns a claim for `count` GPUs with this percentage of each that waits.
pub(crate) fn waiting(name: &str, count: usize, percent: u64) -> Value {
    let mut request = json!({"deviceClassName": "tessera", "allocationMode": "ExactCount", "count": count});
    if percent < 100 {
        let memory = format!("{}Mi", percent * GPU_MIB / 100);
        request["capacity"] = json!({"requests": {"cores": percent.to_string(), "memory": memory}});
    }
    json!({
        "metadata": {"name": name, "namespace": "team", "uid": format!("uid-{name}")},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}]}},
        "status": {},
    })
}

/// Returns a claim as kube-scheduler allocates it: these GPUs of a node, reserved for these pods.
pub(crate) fn allocated(name: &str, percent: u64, node: &str, gpus: &[u8], pods: &[&str]) -> Value {
    let memory = format!("{}Mi", percent * GPU_MIB / 100);
    let result = |gpu: &u8| {
        json!({
            "request": "gpu", "driver": "gpu.tessera.dev", "pool": node, "device": format!("gpu-{gpu}"),
            "shareID": "5e7cb2b5-2e5b-4c1b-9a3e-000000000000",
            "consumedCapacity": {"cores": percent.to_string(), "memory": memory},
        })
    };
    let results: Vec<Value> = gpus.iter().map(result).collect();
    let pods: Vec<Value> = pods
        .iter()
        .map(|pod| json!({"resource": "pods", "name": pod, "uid": format!("uid-{pod}")}))
        .collect();
    let mut claim = waiting(name, gpus.len(), percent);
    claim["status"] = json!({
        "allocation": {
            "devices": {"results": results}, "allocationTimestamp": "2026-11-18T03:00:00Z",
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": []}]},
        },
        "reservedFor": pods,
    });
    claim
}

pub(crate) fn pod_with(name: &str, claim: &str) -> Value {
    let mut pod = pod(name, &[]);
    pod["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": claim}]);
    pod
}

fn read(claim: &Value) -> ResourceClaim {
    serde_json::from_value(claim.clone()).unwrap()
}

pub(crate) fn show(state: &mut State, claim: &Value) {
    state.handle(StateEvent::Claim(WatchEvent::Set(read(claim))));
}

fn book(state: &mut State, pod: &str, claim: &Value, node: &str) -> Result<Option<ClaimPlan>, ClaimRefusal> {
    let pod = pod_with(pod, claim["metadata"]["name"].as_str().unwrap());
    let args = bind_args(&pod, node);
    let plans = state.book_claims(&args, &parse(&pod), &[read(claim)], Timestamp::default())?;
    Ok(plans.into_iter().next())
}

fn end(state: &mut State, plan: &ClaimPlan) {
    state.end_claim(&plan.uid, ClaimOutcome::Kept, Timestamp::default());
}

fn percents(state: &State, node: &str) -> Vec<u32> {
    let node = state.ledger().node(&node.into()).unwrap();
    let used = |gpu| node.used(gpu);
    node.node()
        .gpus()
        .iter()
        .map(|gpu| if used(gpu.index).whole { 100 } else { used(gpu.index).compute_percent.0 })
        .collect()
}

/// Allows the namespace of the claims this percentage of all GPUs.
fn limit(state: &mut State, compute_percent: u64) {
    let limit = NamespaceLimit { compute_percent: Some(compute_percent), ..NamespaceLimit::default() };
    let quota = Quota { namespaces: [("team".to_owned(), limit)].into(), ..Quota::default() };
    state.handle(StateEvent::Quota(quota));
}

#[test]
fn claims_that_arrive_together_keep_within_the_quota() {
    let mut state = state_with(&[node("n", 4, "GiB")]);
    limit(&mut state, 100);
    let one = allocated("one", 60, "n", &[0], &["p-one"]);
    let two = allocated("two", 60, "n", &[1], &["p-two"]);
    // kube-scheduler allocated both before the watch showed one of them.
    let plan = book(&mut state, "p-one", &one, "n").unwrap().unwrap();
    let refused = book(&mut state, "p-two", &two, "n").unwrap_err();
    assert_eq!(refused.to_string(), "node n: ExceedsGPUQuota: GPU compute");
    assert_eq!(percents(&state, "n"), [60, 0, 0, 0]);
    // Its own allocation does not count against a claim, neither by the watch nor booked.
    show(&mut state, &one);
    end(&mut state, &plan);
    book(&mut state, "p-one", &one, "n").unwrap().unwrap();
    // Filter rejects the node of an allocation that exceeds the quota, so that kube-scheduler clears it.
    show(&mut state, &two);
    let reason = |state: &State, name: &str, claim: &str| {
        filter(state, &pod_with(name, claim), &["n"]).failed_nodes.get("n").cloned()
    };
    assert_eq!(reason(&state, "p-two", "two").as_deref(), Some("ExceedsGPUQuota: GPU compute"));
    // A claim that another pod uses takes nothing more.
    let shared = allocated("one", 60, "n", &[0], &["p-one", "p-three"]);
    show(&mut state, &shared);
    limit(&mut state, 10);
    assert_eq!(reason(&state, "p-three", "one"), None);
}

#[test]
fn a_claim_counts_once_whatever_the_number_of_its_pods() {
    let mut state = state_with(&[]);
    show(&mut state, &allocated("c", 30, "n", &[1], &["p", "q"]));
    set_node(&mut state, &node("n", 2, "GiB"));
    assert_eq!(percents(&state, "n"), [0, 30], "the claim was known before its node");
    set_pod(&mut state, &{
        let mut pod = pod_with("p", "c");
        pod["spec"]["nodeName"] = "n".into();
        pod
    });
    assert_eq!(percents(&state, "n"), [0, 30]);
    state.handle(StateEvent::Pod(WatchEvent::Listing));
    state.handle(StateEvent::Pod(WatchEvent::Listed));
    assert_eq!(percents(&state, "n"), [0, 30], "a list of pods does not end claims");
    show(&mut state, &waiting("c", 1, 30));
    assert_eq!(percents(&state, "n"), [0, 0]);
}

#[test]
fn allocations_that_the_node_cannot_have_are_ignored() {
    let mut state = state_with(&[node("n", 2, "GiB")]);
    show(&mut state, &allocated("unknown", 30, "n", &[7], &["p"]));
    let mut other = allocated("other", 30, "n", &[0], &["p"]);
    other["status"]["allocation"]["devices"]["results"][0]["driver"] = "gpu.example".into();
    show(&mut state, &other);
    let mut admin = allocated("admin", 30, "n", &[0], &["p"]);
    admin["status"]["allocation"]["devices"]["results"][0]["adminAccess"] = true.into();
    show(&mut state, &admin);
    assert_eq!(percents(&state, "n"), [0, 0]);
    let refusal = book(&mut state, "p", &allocated("unknown", 30, "n", &[7], &["p"]), "n").unwrap_err();
    assert!(refusal.to_string().contains("does not have"), "{refusal}");
}

#[test]
fn a_stale_proposal_is_corrected_and_the_booking_outlives_older_events() {
    let mut state = state_with(&[node("n", 2, "GiB")]);
    let first = allocated("first", 100, "n", &[0], &["p"]);
    let plan = book(&mut state, "p", &first, "n").unwrap().unwrap();
    assert_eq!(plan.replaced, None);
    show(&mut state, &first);
    end(&mut state, &plan);
    let stale = allocated("second", 100, "n", &[0], &["q"]);
    show(&mut state, &stale);
    let plan = book(&mut state, "q", &stale, "n").unwrap().unwrap();
    assert_eq!((plan.replaced, &plan.parts[0].gpus[..]), (Some(Replacement::NoRoom), &[GpuIndex(1)][..]));
    assert!(matches!(book(&mut state, "q", &stale, "n"), Err(ClaimRefusal::Busy(_))));
    for older in [&stale, &waiting("second", 1, 100)] {
        show(&mut state, older);
        assert_eq!(percents(&state, "n"), [100, 100]);
    }
    end(&mut state, &plan);
    show(&mut state, &allocated("second", 100, "n", &[1], &["q"]));
    show(&mut state, &waiting("second", 1, 100));
    assert_eq!(percents(&state, "n"), [100, 0], "after its confirmation the watch counts");
    let third = allocated("third", 100, "n", &[0], &["r"]);
    let plan = book(&mut state, "r", &third, "n").unwrap().unwrap();
    state.end_claim(&plan.uid, ClaimOutcome::Unwritten, Timestamp::default());
    assert_eq!(percents(&state, "n"), [100, 0]);
}

#[test]
fn a_booking_without_confirmation_expires() {
    let mut state = state_with(&[node("n", 1, "GiB")]);
    let plan = book(&mut state, "p", &allocated("c", 100, "n", &[0], &["p"]), "n").unwrap().unwrap();
    end(&mut state, &plan);
    let later = Timestamp { steady: std::time::Duration::from_secs(80), ..Timestamp::default() };
    assert!(!state.has_expired_claims(Timestamp::default()) && state.has_expired_claims(later));
    state.expire_claim_bookings(later);
    assert_eq!(percents(&state, "n"), [0]);
}

#[test]
fn a_shared_claim_is_left_alone() {
    let mut state = state_with(&[node("n", 2, "GiB")]);
    show(&mut state, &allocated("first", 100, "n", &[0], &["p"]));
    let shared = allocated("shared", 30, "n", &[0], &["q", "r"]);
    let refusal = book(&mut state, "q", &shared, "n").unwrap_err();
    assert!(refusal.to_string().contains("another pod uses the claim"), "{refusal}");
    assert!(matches!(book(&mut state, "x", &shared, "n"), Err(ClaimRefusal::NotReserved(_))));
    assert_eq!(percents(&state, "n"), [100, 0], "a refusal books nothing");
}

/// kube-scheduler proposes the first GPU for all of them, because it does not know the corrections yet.
#[test]
fn shares_that_fill_a_node_exactly_all_find_their_place() {
    let mut state = state_with(&[node("n", 12, "GiB")]);
    let claims: Vec<Value> =
        (0..36).map(|i| allocated(&format!("c{i}"), 30, "n", &[0], &[&format!("p{i}")])).collect();
    for (i, claim) in claims.iter().enumerate() {
        if i % 2 == 0 {
            show(&mut state, claim);
        }
        let plan = book(&mut state, &format!("p{i}"), claim, "n").unwrap().unwrap();
        end(&mut state, &plan);
    }
    assert_eq!(percents(&state, "n"), [90; 12]);
    let more = allocated("more", 30, "n", &[3], &["p"]);
    assert!(matches!(book(&mut state, "p", &more, "n"), Err(ClaimRefusal::NoRoom { .. })));
}

#[test]
fn filter_judges_what_a_claim_certainly_needs() {
    let mut state = state_with(&[node("one", 1, "GiB"), node("two", 2, "GiB")]);
    let nodes = ["one", "two"];
    let fitting = |state: &State, pod: &Value| filter(state, pod, &nodes).node_names.unwrap_or_default();
    show(&mut state, &waiting("pair", 2, 100));
    assert_eq!(fitting(&state, &pod_with("p", "pair")), ["two"]);
    assert_eq!(fitting(&state, &pod_with("p", "unknown")), nodes, "in doubt kube-scheduler decides");
    show(&mut state, &allocated("taken", 80, "one", &[0], &["q"]));
    show(&mut state, &waiting("share", 1, 30));
    assert_eq!(fitting(&state, &pod_with("p", "share")), ["two"]);
    show(&mut state, &allocated("late", 80, "one", &[0], &["p"]));
    assert_eq!(fitting(&state, &pod_with("p", "late")), ["two"], "the allocation cannot be corrected there");
    assert_eq!(fitting(&state, &whole("w", 1)), ["two"], "pods with resources see what claims hold");
}

/// The grant of the resources and the grant of the claim would be mounted at the same place.
#[test]
fn a_container_with_resources_and_a_claim_is_refused() {
    let mut state = state_with(&[node("n", 2, "GiB")]);
    show(&mut state, &waiting("c", 1, 30));
    let mut mixed = share("p", 20);
    mixed["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimName": "c"}]);
    mixed["spec"]["containers"][0]["resources"]["claims"] = json!([{"name": "gpu"}]);
    let container = mixed["spec"]["containers"][0]["name"].as_str().unwrap().to_owned();
    let refused = filter(&state, &mixed, &["n"]).failed_and_unresolvable_nodes["n"].clone();
    assert!(
        refused.starts_with(&format!("container {container} requests GPUs by resources and by a claim")),
        "{refused}"
    );
    // A claim for another device is no reason, and neither is another container.
    let mut other = waiting("c", 1, 30);
    other["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] = "nic".into();
    show(&mut state, &other);
    assert_eq!(passed(&filter(&state, &mixed, &["n"])), ["n"]);
    show(&mut state, &waiting("c", 1, 30));
    mixed["spec"]["containers"][0]["resources"]["claims"] = json!([]);
    assert_eq!(passed(&filter(&state, &mixed, &["n"])), ["n"]);
}

#[test]
fn explains_why_a_pod_with_a_claim_waits_and_which_claim_holds_the_gpu() {
    let mut state = state_with(&[node("n", 1, "GiB")]);
    show(&mut state, &allocated("taken", 80, "n", &[0], &["q"]));
    show(&mut state, &waiting("share", 1, 30));
    set_pod(&mut state, &pod_with("p", "share"));
    let explained = tessera_scheduler::verb::explain::explain(&state, "team", "p").unwrap().unwrap();
    assert!(explained.waits && explained.asks[0].starts_with("claim: 30"), "{explained:?}");
    assert!(!explained.nodes[0].would_do, "{:?}", explained.nodes);
    assert_eq!(explained.relief[0].pods, ["claim team/taken"]);
    let shares = state.inspect_share(None);
    assert_eq!(shares.nodes[0].devs[0].pods[0].name, "taken/claim");
    let mut bound = pod_with("p", "share");
    bound["spec"]["nodeName"] = "n".into();
    set_pod(&mut state, &bound);
    assert!(tessera_scheduler::verb::explain::explain(&state, "team", "p").is_none());
}

#[test]
fn a_class_serves_unchanged_pods_on_nodes_without_plugins() {
    let mut plain = node("n", 1, "GiB");
    plain["status"] = json!({"capacity": {"cpu": "64", "memory": "256Gi"}, "allocatable": {"cpu": "64", "memory": "256Gi"}});
    let mut state = state_with(&[plain]);
    let pod = whole("w", 1);
    assert_eq!(filter(&state, &pod, &["n"]).node_names.unwrap_or_default(), [""; 0]);
    let mut serving = class();
    serving["metadata"]["name"] = "nvidia".into();
    serving["spec"]["extendedResourceName"] = "nvidia.com/gpu".into();
    state.handle(StateEvent::Class(WatchEvent::Set(serde_json::from_value(serving).unwrap())));
    assert_eq!(filter(&state, &pod, &["n"]).node_names.unwrap_or_default(), ["n"]);
    assert!(state.may_use_claims(&bind_args(&pod, "n")));
}

/// kube-scheduler makes a claim for a pod with GPU resources. The claim holds the GPUs, so the pod must not count again.
#[test]
fn a_pod_whose_gpus_a_claim_holds_counts_once() {
    let mut state = state_with(&[node("n", 2, "GiB")]);
    show(&mut state, &allocated("made", 100, "n", &[0], &["p"]));
    let mut pod = whole("p", 1);
    pod["spec"]["nodeName"] = "n".into();
    pod["status"] = json!({"phase": "Running", "extendedResourceClaimStatus": {"resourceClaimName": "made",
        "requestMappings": [{"containerName": "main", "resourceName": "nvidia.com/gpu", "requestName": "gpu"}]}});
    set_pod(&mut state, &pod);
    assert_eq!(filter(&state, &whole("next", 1), &["n"]).node_names.unwrap_or_default(), ["n"]);
    assert_eq!(filter(&state, &whole("large", 2), &["n"]).node_names.unwrap_or_default(), [""; 0]);
}

#[test]
fn pods_are_mapped_to_the_gpus_of_their_claims() {
    let mut state = state_with(&[node("n", 3, "GiB")]);
    show(&mut state, &allocated("shared", 30, "n", &[1], &["p", "q"]));
    show(&mut state, &waiting("later", 1, 100));
    let page = |state: &State| {
        let page = Metrics::default().text(Some(state), Format::Plain);
        page.lines().filter(|line| line.starts_with("pod_and_gpu_map_info{")).map(str::to_owned).collect()
    };
    let series = |gpu: u8, pod: &str| {
        format!(
            r#"pod_and_gpu_map_info{{gpu_id="GPU-n-{gpu}",gpu_model="T4",namespace="team",node="n",pod_name="{pod}"}} 1"#
        )
    };
    let shown: Vec<String> = page(&state);
    assert_eq!(shown, [series(1, "p"), series(1, "q")]);
    show(&mut state, &allocated("later", 100, "n", &[2], &["late"]));
    let shown: Vec<String> = page(&state);
    assert_eq!(shown, [series(1, "p"), series(1, "q"), series(2, "late")]);
    let by_node = tessera_scheduler::metrics::text_by_node(&state, Format::Plain);
    assert!(by_node.contains(r#"n_info{gpu_id="GPU-n-2""#), "{by_node}");
}

proptest! {
    /// Bookings never exceed a GPU, in whatever order the watch shows proposals, corrections and ends.
    #[test]
    fn bookings_never_exceed_a_gpu(steps in proptest::collection::vec((0usize..8, 0u8..3, 0u8..5), 1..80)) {
        let mut state = state_with(&[node("n", 3, "GiB")]);
        let percent = [30, 50, 100, 70, 10, 45, 60, 25];
        let mut held: Vec<Option<ClaimPlan>> = vec![None; 8];
        for (number, gpu, step) in steps {
            let (name, pod) = (format!("c{number}"), format!("p{number}"));
            let proposal = allocated(&name, percent[number], "n", &[gpu], &[&pod]);
            match step {
                0 | 1 if held[number].is_none() => {
                    held[number] = book(&mut state, &pod, &proposal, "n").unwrap_or_default();
                }
                2 => if let Some(plan) = &held[number] {
                    end(&mut state, plan);
                    let gpus: Vec<u8> = plan.parts[0].gpus.iter().map(|gpu| gpu.0).collect();
                    show(&mut state, &allocated(&name, percent[number], "n", &gpus, &[&pod]));
                },
                3 if held[number].is_none() => show(&mut state, &waiting(&name, 1, percent[number])),
                4 => {
                    state.handle(StateEvent::Claim(WatchEvent::Set(read(&waiting(&name, 1, percent[number])))));
                    state.handle(StateEvent::Claim(WatchEvent::Gone(read(&waiting(&name, 1, percent[number])))));
                    held[number] = None;
                }
                _ => {}
            }
            prop_assert!(state.ledger().overbooked().is_empty(), "{:?}", state.ledger().overbooked());
        }
    }
}

async fn replica(api: &ApiServer) -> Replica {
    let identity = "claims".to_owned();
    let change = |membership| Membership { identity, ..membership };
    let replica = Replica::with_settings(api, settings(), AgentReader::default(), change);
    eventually(|| replica.app.is_ready()).await;
    replica
}

/// Creates a pod and a claim that is reserved for it, and returns the pod.
fn create(api: &ApiServer, name: &str, gpus: &[u8]) -> Value {
    let pod = api.create("/api/v1/namespaces/team/pods", pod_with(name, name)).unwrap();
    let mut claim = allocated(name, 100, "n", gpus, &[name]);
    claim["status"]["reservedFor"][0]["uid"] = pod["metadata"]["uid"].clone();
    api.create(CLAIMS, claim).unwrap();
    pod
}

fn devices(api: &ApiServer, claim: &str) -> Vec<String> {
    let claim = api.get(&format!("{CLAIMS}/{claim}")).unwrap();
    let results = claim.pointer("/status/allocation/devices/results").cloned().unwrap_or_default();
    let results = results.as_array().cloned().unwrap_or_default();
    results.iter().map(|result| result["device"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn binds_pods_with_claims_and_writes_corrections() {
    let api = ApiServer::start().await.unwrap();
    api.create("/api/v1/nodes", node("n", 2, "GiB")).unwrap();
    api.create("/apis/resource.k8s.io/v1/deviceclasses", class()).unwrap();
    let replica = replica(&api).await;
    let first = create(&api, "first", &[0]);
    assert_eq!(replica.bind(&first, "n").await, "");
    assert_eq!(devices(&api, "first"), ["gpu-0"]);
    let second = create(&api, "second", &[0]);
    assert_eq!(replica.bind(&second, "n").await, "");
    assert_eq!(devices(&api, "second"), ["gpu-1"], "the proposal was stale");
    let claim = api.get(&format!("{CLAIMS}/second")).unwrap();
    let allocation = &claim["status"]["allocation"];
    assert_eq!(allocation["allocationTimestamp"], "2026-11-18T03:00:00Z");
    let share = allocation["devices"]["results"][0]["shareID"].as_str().unwrap();
    assert!(share.len() == 36 && !share.ends_with("000000000000"), "{share}");
    assert_eq!(claim["status"]["reservedFor"][0]["uid"], second["metadata"]["uid"]);
    let third = create(&api, "third", &[1]);
    let error = replica.bind(&third, "n").await;
    assert!(error.contains("GPU 1 of node n has too little left"), "{error}");
    eventually(|| !told(&api, "third", "ClaimRefused").is_empty()).await;
    let message = told(&api, "third", "ClaimRefused").remove(0);
    assert!(
        message.starts_with("pod third is not bound to node n: claim third: GPU 1 of node n"),
        "{message}"
    );
    eventually(|| !told(&api, "second", "GpusReplaced").is_empty()).await;
    let message = told(&api, "second", "GpusReplaced").remove(0);
    assert_eq!(message, "the allocated GPUs were given to another pod: GPU 1 of node n for pod second");
    let event =
        api.list("/api/v1/namespaces/team/events").into_iter().find(|one| one["reason"] == "GpusReplaced");
    assert_eq!(event.unwrap()["involvedObject"]["kind"], "ResourceClaim");
    // kube-scheduler reports that a pod waits.
    let waits = api.create("/api/v1/namespaces/team/pods", pod_with("fourth", "fourth")).unwrap();
    api.create(CLAIMS, waiting("fourth", 1, 30)).unwrap();
    eventually(|| {
        let state = replica.app.read();
        filter(&state, &pod_with("fourth", "fourth"), &["n"]).failed_nodes.contains_key("n")
    })
    .await;
    let report = json!({"status": {"conditions": [{"type": "PodScheduled", "status": "False",
        "message": "0/1 nodes are available: 1 cannot allocate all claims."}]}});
    let path = format!("/api/v1/namespaces/team/pods/{}/status", waits["metadata"]["name"].as_str().unwrap());
    api.patch(&path, &report).unwrap();
    eventually(|| !told(&api, "fourth", "ClaimWaits").is_empty()).await;
    let message = told(&api, "fourth", "ClaimWaits").remove(0);
    assert_eq!(message, "pod fourth waits: 0/1 nodes are available: 1 cannot allocate all claims.");
    for (name, node) in [("first", "n"), ("second", "n")] {
        let pod = api.get(&format!("/api/v1/namespaces/team/pods/{name}")).unwrap();
        assert_eq!(pod["spec"]["nodeName"], node);
    }
    // A pod without GPUs passes, because kube-scheduler calls the extender for every pod.
    let plain = api.create("/api/v1/namespaces/team/pods", pod("plain", &[("cpu", "1")])).unwrap();
    assert_eq!(replica.bind(&plain, "n").await, "");
}

/// A scheduler that ended after the first write leaves a claim without an allocation.
#[tokio::test]
async fn a_claim_that_was_only_cleared_is_allocated_again() {
    let api = ApiServer::start().await.unwrap();
    api.create("/api/v1/nodes", node("n", 1, "GiB")).unwrap();
    api.create("/apis/resource.k8s.io/v1/deviceclasses", class()).unwrap();
    let pod = create(&api, "p", &[0]);
    let path = format!("{CLAIMS}/p");
    let before = api.get(&path).unwrap();
    let gone = json!({"status": {"allocation": null, "reservedFor": null}});
    api.patch(&format!("{path}/status"), &gone).unwrap();
    let replica = replica(&api).await;
    let error = replica.bind(&pod, "n").await;
    assert!(error.contains("claim p is not allocated"), "{error}");
    assert_eq!(percents(&replica.app.read(), "n"), [0]);
    api.patch(&format!("{path}/status"), &json!({"status": before["status"]})).unwrap();
    assert_eq!(replica.bind(&pod, "n").await, "");
    assert_eq!(devices(&api, "p"), ["gpu-0"]);
}
