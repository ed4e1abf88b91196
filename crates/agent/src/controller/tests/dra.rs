//! Claims: the slice of the node, and what happens when the kubelet prepares and releases claims.

use std::{collections::BTreeMap, collections::VecDeque, path::PathBuf, time::Duration};

use tessera_core::{
    grant::Hold,
    units::{GpuIndex, MiB, Percent},
};
use tessera_limits::{Bytes, GpuLimit};
use tessera_node::dra::{ClaimReference, DeviceHealth, PreparedDevice};
use tessera_node::gpus::{Incident, IncidentKind};
use tessera_wire::{
    foreign::{
        dra::{AllocationResult, Consumer, ResourceClaim, SliceSpec},
        objects::{Amount, Node, Pod},
    },
    tessera::dra::{DRIVER, PreparedClaim, is_shared},
};

use super::super::{
    Action, Agent, AgentSettings, CallAnswer, CallId, ClaimFiles, ClaimSettings, Event, EventTime,
};
use super::world::{found, settings};

/// A node whose agent serves claims, with an API server and a disk in memory.
struct ClaimWorld {
    agent: Agent,
    elapsed: Duration,
    calls: u64,
    answers: BTreeMap<CallId, CallAnswer>,
    claims: BTreeMap<String, ResourceClaim>,
    slice: Option<SliceSpec>,
    writes: usize,
    /// What an API server makes of a slice that is written.
    store: fn(SliceSpec) -> SliceSpec,
    disk: BTreeMap<String, ClaimFiles>,
    health: Vec<Vec<DeviceHealth>>,
    /// Kinds of actions in their order.
    log: Vec<&'static str>,
    warnings: Vec<String>,
}

fn offering() -> AgentSettings {
    let claims = Some(ClaimSettings {
        cdi_directory: PathBuf::from("/cdi"),
        registry: PathBuf::from("/registry"),
        plugins: PathBuf::from("/plugins"),
    });
    AgentSettings { claims, dialects: Vec::new(), ..settings() }
}

impl ClaimWorld {
    fn new() -> Self {
        Self::storing(|slice| slice)
    }

    fn storing(store: fn(SliceSpec) -> SliceSpec) -> Self {
        let mut world = Self {
            agent: Agent::new(offering()),
            elapsed: Duration::ZERO,
            calls: 0,
            answers: BTreeMap::new(),
            claims: BTreeMap::new(),
            slice: None,
            writes: 0,
            store,
            disk: BTreeMap::new(),
            health: Vec::new(),
            log: Vec::new(),
            warnings: Vec::new(),
        };
        world.start();
        world
    }

    fn start(&mut self) {
        self.event(Event::ClaimsOnDisk(self.disk.values().map(|files| files.claim.clone()).collect()));
        self.event(Event::Slice(self.slice.clone().map(Box::new)));
        let mut node = Node::default();
        node.metadata.uid = "node-uid".into();
        self.event(Event::Node(Box::new(node)));
        self.event(Event::Gpus(Ok(found())));
    }

    fn restart(&mut self) {
        self.agent = Agent::new(offering());
        self.log.clear();
        self.start();
    }

    fn event(&mut self, event: Event) {
        let mut queue = VecDeque::from([event]);
        while let Some(event) = queue.pop_front() {
            self.elapsed += Duration::from_micros(100);
            let now = EventTime { elapsed: self.elapsed, unix_nanos: 17 };
            for action in self.agent.handle(now, event) {
                queue.extend(self.carry_out(action));
            }
        }
    }

    fn carry_out(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::WriteSlice { node_uid, spec } => {
                assert_eq!(node_uid, "node-uid");
                self.writes += 1;
                self.slice = Some((self.store)(*spec));
                Some(Event::SliceWritten(Ok(Box::new(self.slice.clone()?))))
            }
            Action::PublishHealth(health) => {
                self.log.push("health");
                self.health.push(health);
                None
            }
            Action::ReadClaim(claim) => {
                let read = self.claims.get(&claim.name).cloned().unwrap_or_default();
                Some(Event::ClaimRead(claim, Ok(Box::new(read))))
            }
            Action::StoreClaim(files) => {
                self.log.push("store");
                let uid = files.claim.uid.clone();
                self.disk.insert(uid.clone(), *files);
                Some(Event::ClaimStored(uid, Ok(())))
            }
            Action::RemoveClaim(call, uid) => {
                assert!(self.disk.remove(&uid).is_some(), "removed twice");
                Some(Event::ClaimRemoved(call, Ok(())))
            }
            Action::Answer(call, answer) => {
                assert!(self.answers.insert(call, answer).is_none(), "answered twice");
                None
            }
            Action::Warn(warning) => {
                self.warnings.push(warning.to_string());
                None
            }
            _ => None,
        }
    }

    fn wait(&mut self, seconds: u64) {
        self.elapsed += Duration::from_secs(seconds);
        self.event(Event::Tick);
    }

    /// Creates a claim that is allocated and reserved.
    fn allocate(&mut self, name: &str, results: Vec<AllocationResult>) {
        let mut claim = ResourceClaim::default();
        claim.metadata.name = name.into();
        claim.metadata.namespace = "team".into();
        claim.metadata.uid = format!("uid-{name}");
        claim.status.allocation.get_or_insert_default().devices.results = results;
        claim.status.reserved_for = vec![Consumer {
            resource: "pods".into(),
            name: "p".into(),
            uid: "p".into(),
            ..Consumer::default()
        }];
        self.claims.insert(name.into(), claim);
    }

    fn call(&mut self, event: impl FnOnce(CallId) -> Event) -> CallId {
        self.calls += 1;
        let call = CallId(self.calls);
        self.event(event(call));
        call
    }

    fn start_preparing(&mut self, name: &str) -> CallId {
        let claim = reference(name);
        self.call(|call| Event::PrepareClaim(call, claim))
    }

    fn prepared(&mut self, call: CallId) -> Option<Result<Vec<PreparedDevice>, String>> {
        match self.answers.remove(&call)? {
            CallAnswer::Prepared(answer) => Some(answer.map_err(|error| error.to_string())),
            other => panic!("{other:?}"),
        }
    }

    fn prepare(&mut self, name: &str) -> Result<Vec<PreparedDevice>, String> {
        let call = self.start_preparing(name);
        self.prepared(call).expect("answered at once")
    }

    fn unprepare(&mut self, name: &str) {
        let claim = reference(name);
        let call = self.call(|call| Event::UnprepareClaim(call, claim));
        assert!(matches!(self.answers.remove(&call), Some(CallAnswer::Unprepared(Ok(())))));
    }
}

fn reference(name: &str) -> ClaimReference {
    ClaimReference { uid: format!("uid-{name}"), namespace: "team".into(), name: name.into() }
}

fn result(request: &str, gpu: u8, amounts: &[(&str, &str)]) -> AllocationResult {
    AllocationResult {
        request: request.into(),
        driver: DRIVER.into(),
        pool: settings().node.to_string(),
        device: format!("gpu-{gpu}"),
        share_id: Some(format!("share-{request}")),
        consumed_capacity: amounts
            .iter()
            .map(|(name, amount)| ((*name).to_owned(), Amount((*amount).to_owned())))
            .collect(),
        ..AllocationResult::default()
    }
}

fn share(gpu: u8, cores: &str) -> Vec<AllocationResult> {
    vec![result("gpu", gpu, &[("cores", cores), ("memory", "1Gi")])]
}

#[test]
fn the_slice_is_written_once_and_again_after_the_kubelet_deleted_it() {
    let mut world = ClaimWorld::new();
    assert_eq!(world.writes, 1);
    let slice = world.slice.clone().unwrap();
    assert_eq!(slice.devices.len(), found().gpus.len());
    assert!(is_shared(&slice));
    world.event(Event::Slice(Some(Box::new(slice.clone()))));
    world.wait(60);
    assert_eq!(world.writes, 1, "an equal slice is not written");
    world.event(Event::Slice(None));
    assert_eq!((world.writes, world.slice.as_ref()), (2, Some(&slice)));
    // Another writer changes the slice.
    world.event(Event::Slice(Some(Box::new(SliceSpec { devices: Vec::new(), ..slice }))));
    assert_eq!(world.writes, 3);
}

#[test]
fn whole_gpus_are_offered_where_the_api_server_drops_the_fields_of_shares() {
    let mut world = ClaimWorld::storing(|mut slice| {
        for device in &mut slice.devices {
            device.allow_multiple_allocations = false;
            device.capacity.values_mut().for_each(|capacity| capacity.request_policy = None);
        }
        slice
    });
    world.wait(60);
    assert_eq!(world.writes, 1, "what was stored is what whole GPUs look like");
    assert!(world.warnings[0].contains("DRAConsumableCapacity"), "{:?}", world.warnings);
    world.allocate("whole", vec![result("gpu", 0, &[])]);
    assert_eq!(world.prepare("whole").unwrap()[0].device, "gpu-0");
}

#[test]
fn cordoned_gpus_are_tainted_and_stay_healthy() {
    let mut world = ClaimWorld::new();
    let mut node = Node::default();
    node.metadata.uid = "node-uid".into();
    let cordon = ("tessera.dev/gpu-cordon".to_owned(), found().gpus[1].uuid.to_string());
    node.metadata.annotations = [cordon].into();
    world.event(Event::Node(Box::new(node.clone())));
    let taints = |world: &ClaimWorld| -> Vec<String> {
        let devices = world.slice.as_ref().unwrap().devices.iter();
        devices.flat_map(|device| device.taints.iter().map(|taint| taint.value.clone())).collect()
    };
    assert_eq!(taints(&world), ["cordoned"]);
    assert_eq!(world.slice.as_ref().unwrap().devices[1].taints.len(), 1);
    assert_eq!(world.health.last().unwrap()[1].problem, None, "containers on it run on");
    node.metadata.annotations.clear();
    world.event(Event::Node(Box::new(node)));
    assert_eq!(taints(&world), [""; 0]);
}

#[test]
fn broken_gpus_are_tainted_or_left_out_where_taints_are_dropped() {
    let broken = || {
        let gpu = Some(found().gpus[1].uuid.clone());
        Event::Incident(Incident { gpu, kind: IncidentKind::Lost })
    };
    let mut world = ClaimWorld::new();
    world.event(broken());
    assert_eq!(world.slice.as_ref().unwrap().devices[1].taints[0].value, "broken");
    assert_eq!(world.health.last().unwrap()[1].problem.as_deref(), Some("the GPU is unhealthy"));
    world.allocate("late", share(1, "10"));
    assert!(world.prepare("late").unwrap_err().contains("gpu-1 is unhealthy"));

    let mut world = ClaimWorld::storing(|mut slice| {
        slice.devices.iter_mut().for_each(|device| device.taints.clear());
        slice
    });
    world.event(broken());
    let names: Vec<_> =
        world.slice.as_ref().unwrap().devices.iter().map(|device| device.name.clone()).collect();
    assert!(!names.contains(&"gpu-1".to_owned()) && names.contains(&"gpu-0".to_owned()), "{names:?}");
    let writes = world.writes;
    world.wait(60);
    assert_eq!(world.writes, writes, "nothing is written over and over");
}

#[test]
fn a_claim_is_prepared_once_and_gets_its_limits() {
    let mut world = ClaimWorld::new();
    world.allocate("a", share(0, "30"));
    let first = world.prepare("a").unwrap();
    assert_eq!(
        first,
        [PreparedDevice {
            request: "gpu".into(),
            pool: settings().node.to_string(),
            device: "gpu-0".into(),
            cdi_names: vec!["tessera.dev/claim=uid-a-gpu".into()],
            share_id: Some("share-gpu".into()),
        }]
    );
    let stored = world.log.len();
    assert_eq!(world.prepare("a").unwrap(), first);
    assert_eq!(world.log.len(), stored, "nothing is prepared twice");
    let files = &world.disk["uid-a"];
    let limit = &files.limits[0].gpus[0];
    assert_eq!((limit.memory, limit.compute_percent), (Bytes::from_mib(1024), 30));
    let mounts: Vec<_> = files.edits[0].mounts.iter().map(|mount| mount.container.as_str()).collect();
    assert_eq!(mounts[..2], ["/etc/tessera/uid-a-gpu", "/etc/tessera/uid-a-gpu/account"]);
    world.unprepare("a");
    world.unprepare("a");
    assert!(world.disk.is_empty());
}

#[test]
fn requests_of_a_claim_have_grants_of_their_own() {
    let mut world = ClaimWorld::new();
    let whole = result("big/any", 1, &[]);
    let admin = AllocationResult { admin_access: true, ..result("watch", 0, &[]) };
    let small = result("small", 0, &[("cores", "30"), ("memory", "1Gi")]);
    world.allocate(
        "a",
        vec![small.clone(), whole, admin, AllocationResult { device: "gpu-2".into(), ..small }],
    );
    let devices = world.prepare("a").unwrap();
    let requests: Vec<_> = devices.iter().map(|one| (one.request.as_str(), one.cdi_names.len())).collect();
    assert_eq!(requests, [("small", 1), ("big", 1), ("watch", 1), ("small", 0)]);
    let files = &world.disk["uid-a"];
    let limits: Vec<_> = files.limits.iter().map(|one| (one.container.as_str(), one.gpus.len())).collect();
    assert_eq!(limits, [("small", 2), ("big.any", 1)], "administrative access holds nothing");
    assert_eq!(files.limits[1].gpus[0].memory, GpuLimit::WHOLE);
    // What looks on takes nothing away: the rest of GPU 0 is free.
    world.allocate("rest", share(0, "70"));
    world.prepare("rest").unwrap();
}

#[test]
fn requests_with_parts_of_one_gpu_share_a_grant_with_the_sum() {
    let mut world = ClaimWorld::new();
    let one = result("one", 0, &[("cores", "30"), ("memory", "1Gi")]);
    let two = result("two", 0, &[("cores", "50"), ("memory", "2Gi")]);
    world.allocate("a", vec![one, two, result("other", 1, &[("cores", "10"), ("memory", "1Gi")])]);
    world.prepare("a").unwrap();
    let files = &world.disk["uid-a"];
    let limits: Vec<_> = files
        .limits
        .iter()
        .map(|one| (one.container.as_str(), one.gpus[0].memory.whole_mib(), one.gpus[0].compute_percent))
        .collect();
    assert_eq!(limits, [("one", 3072, 80), ("other", 1024, 10)]);
    let mounts: Vec<_> = files.edits.iter().map(|edits| edits.mounts[0].clone()).collect();
    assert_eq!(mounts[0], mounts[1], "a container with both requests has one mount");
    assert_eq!(mounts[0].container, "/etc/tessera/uid-a-one");
    assert_ne!(mounts[0], mounts[2]);
    // The ledger has the sum too.
    world.allocate("rest", share(0, "20"));
    world.prepare("rest").unwrap();
    world.allocate("more", share(0, "1"));
    let waiting = world.start_preparing("more");
    assert_eq!(world.prepared(waiting), None);
    let pod: Pod = serde_json::from_str(
        r#"{"metadata":{"name":"p","namespace":"team","uid":"p"},"status":{"phase":"Running"},
            "spec":{"nodeName":"n","resourceClaims":[{"name":"gpus","resourceClaimName":"a"}],
            "containers":[{"name":"main","resources":{"claims":[{"name":"gpus","request":"one"}]}},
                {"name":"both","resources":{"claims":[{"name":"gpus"}]}}]}}"#,
    )
    .unwrap();
    world.event(Event::Pods(vec![pod]));
    let shown: Vec<_> = world.agent.view().containers.into_iter().map(|one| one.gpus[0]).collect();
    let sum = Hold::Share { compute_percent: Percent(80), memory: MiB(3072) };
    assert_eq!(shown, [(0, sum), (0, sum)], "containers show what they may use");
}

#[test]
fn a_claim_with_a_limit_above_its_cores_has_a_soft_share() {
    let mut world = ClaimWorld::new();
    world.allocate("a", share(0, "30"));
    let config = |limit: u32| {
        serde_json::from_value(serde_json::json!([{ "source": "FromClaim", "opaque": {
            "driver": DRIVER,
            "parameters": { "apiVersion": "gpu.tessera.dev/v1", "kind": "ShareConfig", "coresLimit": limit },
        } }]))
        .unwrap()
    };
    let set = |world: &mut ClaimWorld, limit: u32| {
        let claim = world.claims.get_mut("a").unwrap();
        claim.status.allocation.as_mut().unwrap().devices.config = config(limit);
    };
    set(&mut world, 0);
    let error = world.prepare("a").unwrap_err();
    assert!(error.contains("claim team/a: the configuration for gpu.tessera.dev is not valid"), "{error}");
    set(&mut world, 80);
    world.prepare("a").unwrap();
    let limits = |world: &ClaimWorld| {
        let limit = world.disk["uid-a"].limits[0].gpus[0];
        (limit.compute_percent, limit.compute_ceiling_percent)
    };
    assert_eq!(limits(&world), (30, 80));
    world.restart();
    assert_eq!(limits(&world), (30, 80), "the record has the limit");
    // Only the guaranteed part is held.
    world.allocate("b", share(0, "70"));
    world.prepare("b").unwrap();
}

#[test]
fn a_claim_that_does_not_fit_waits_for_the_release_of_another() {
    let mut world = ClaimWorld::new();
    world.allocate("a", share(0, "60"));
    world.allocate("b", share(0, "50"));
    world.prepare("a").unwrap();
    let waiting = world.start_preparing("b");
    assert_eq!(world.prepared(waiting), None);
    world.wait(5);
    let again = world.start_preparing("b");
    assert_eq!(world.prepared(again), None, "a repeated call waits with the first");
    world.unprepare("a");
    assert!(world.prepared(waiting).unwrap().is_ok() && world.prepared(again).unwrap().is_ok());

    world.allocate("c", share(0, "60"));
    let refused = world.start_preparing("c");
    world.wait(29);
    assert_eq!(world.prepared(refused), None);
    world.wait(2);
    let error = world.prepared(refused).unwrap().unwrap_err();
    assert!(error.starts_with("claim team/c does not fit on gpu-0: other claims and pods"), "{error}");
    assert!(!world.disk.contains_key("uid-c"));
}

#[test]
fn a_claim_that_waits_can_be_released() {
    let mut world = ClaimWorld::new();
    world.allocate("a", vec![result("gpu", 0, &[])]);
    world.allocate("b", share(0, "10"));
    world.prepare("a").unwrap();
    let waiting = world.start_preparing("b");
    world.unprepare("b");
    assert_eq!(world.prepared(waiting).unwrap().unwrap_err(), "claim team/b was released meanwhile");
    world.unprepare("a");
    assert!(world.disk.is_empty());
}

#[test]
fn a_claim_of_another_uid_or_without_allocation_is_refused() {
    let mut world = ClaimWorld::new();
    world.allocate("a", share(0, "10"));
    world.claims.get_mut("a").unwrap().metadata.uid = "new".into();
    assert!(world.prepare("a").unwrap_err().contains("has another UID by now"));
    world.allocate("a", Vec::new());
    assert_eq!(world.prepare("a").unwrap_err(), "claim team/a has no allocation of this driver");
    world.allocate("a", share(0, "10"));
    world.claims.get_mut("a").unwrap().status.reserved_for.clear();
    assert_eq!(world.prepare("a").unwrap_err(), "claim team/a is reserved for no pod");
    world.allocate("a", share(99, "10"));
    assert!(world.prepare("a").unwrap_err().contains("which node"), "a device that does not exist");
    world.allocate("a", share(0, "10"));
    world.prepare("a").unwrap();
}

#[test]
fn a_new_agent_writes_the_files_of_claims_before_it_registers() {
    let mut world = ClaimWorld::new();
    world.allocate("a", share(0, "60"));
    world.prepare("a").unwrap();
    let files = world.disk["uid-a"].clone();
    world.restart();
    assert_eq!(world.log, ["store", "health"]);
    assert_eq!(world.disk["uid-a"], files);
    // The claim still holds its part, and is released by its UID alone.
    world.claims.clear();
    world.allocate("b", share(0, "60"));
    let waiting = world.start_preparing("b");
    assert_eq!(world.prepared(waiting), None);
    world.unprepare("a");
    assert!(world.prepared(waiting).unwrap().is_ok());
    // The GPU of a claim is gone after a restart of the node.
    let claim = PreparedClaim { uid: "gone".into(), ..world.disk["uid-b"].claim.clone() };
    let mut devices = claim.devices.clone();
    devices[0].gpu = "GPU-gone".into();
    let files = ClaimFiles { claim: PreparedClaim { devices, ..claim }, ..world.disk["uid-b"].clone() };
    world.disk.insert("gone".into(), files);
    world.restart();
    assert!(world.warnings.iter().any(|warning| warning.contains("a GPU of a prepared claim is gone")));
}

#[test]
fn containers_show_what_they_hold_by_claims() {
    let mut world = ClaimWorld::new();
    world.allocate("a", vec![result("one", 0, &[("cores", "30"), ("memory", "1Gi")]), result("two", 1, &[])]);
    world.prepare("a").unwrap();
    let pod: Pod = serde_json::from_str(
        r#"{"metadata":{"name":"p","namespace":"team","uid":"p"},"status":{"phase":"Running"},
            "spec":{"nodeName":"n","resourceClaims":[{"name":"gpus","resourceClaimName":"a"}],
            "containers":[{"name":"main","resources":{"claims":[{"name":"gpus","request":"one"}]}},
                {"name":"other","resources":{"claims":[{"name":"gpus"}]}},{"name":"none"}]}}"#,
    )
    .unwrap();
    world.event(Event::Pods(vec![pod]));
    let view = world.agent.view();
    let shown: Vec<_> = view
        .containers
        .iter()
        .map(|one| (one.container.as_str(), one.gpus.iter().map(|gpu| gpu.0).collect()))
        .collect();
    assert_eq!(shown, [("main", vec![0u8]), ("other", vec![0, 1])]);
    let node = view.node.unwrap();
    assert!(!node.fits(GpuIndex(1), Hold::Whole), "the claim counts in the agent's ledger");
}
