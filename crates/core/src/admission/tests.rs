use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use crate::fixtures::{node, pcie_pairs};
use crate::grant::GpuUsage;
use crate::quota::NamespaceLimit;
use crate::request::Request;
use crate::units::{MiB, MilliCpu, Percent};

struct Case {
    state: NodeState,
    service: Service,
    request: PodRequest,
    quota: Quota,
    usage: NamespaceUsage,
    policy: Policy,
}

impl Case {
    fn new(request: Request) -> Self {
        Self {
            state: node(&pcie_pairs(), &[]),
            service: Service::Offered,
            request: PodRequest::of_mains([request]),
            quota: Quota::default(),
            usage: NamespaceUsage::default(),
            policy: Policy::Tessera(Arc::default()),
        }
    }

    fn with_limit(self, limit: NamespaceLimit) -> Self {
        let namespaces = BTreeMap::from([("team".to_owned(), limit)]);
        Self { quota: Quota { namespaces, ..Quota::default() }, ..self }
    }

    fn unserved(self) -> Self {
        Self { service: Service::NotOffered, ..self }
    }

    fn withdrawn(self) -> Self {
        Self { service: Service::Withdrawn, ..self }
    }

    fn without_agent(self) -> Self {
        Self { service: Service::NoAgent, ..self }
    }

    fn check<T>(&self, judge: impl Fn(Admission<'_>) -> T) -> T {
        let quotas = QuotaState { quota: &self.quota, usage: &self.usage };
        let labels = QuotaLabels::default();
        let offer = NodeOffer { state: &self.state, service: self.service, quota_labels: &labels };
        let query = PodQuery { namespace: "team", request: &self.request, policy: &self.policy };
        judge(Admission { offer, query, quota: quotas.limiting("team") })
    }

    /// Returns the reason, after a check that all entry points agree on it.
    fn reason(&self) -> Option<String> {
        self.check(|admission| {
            let verdict = match admission.verdict() {
                NodeVerdict::Fits(placement) => Ok(placement),
                NodeVerdict::Rejected(rejection) => Err(rejection.reason),
            };
            assert_eq!(admission.place(), verdict);
            let reason = verdict.err();
            assert_eq!(admission.score().err(), reason);
            assert_eq!(admission.score_from(admission.cacheable_score()).err(), reason);
            match admission.check() {
                Ok(()) => assert!(matches!(
                    reason,
                    None | Some(RejectReason::Placement(_) | RejectReason::Quota(_))
                )),
                // The node is full, or it has room that the kubelet does not offer.
                Err(RejectReason::Withdrawn) => assert!(reason.is_some()),
                Err(early) => assert_eq!(Some(early), reason),
            }
            reason.map(|reason| reason.to_string())
        })
    }
}

/// The quota counts a GPU that only an init container has, and one that it shares with the others once.
#[test]
fn quotas_count_the_gpus_of_init_containers() {
    let limit = |percent| NamespaceLimit { compute_percent: Some(percent), ..NamespaceLimit::default() };
    let pod = |init: Request, main: Request| {
        let mut request = PodRequest::of_mains([init, main]);
        request.containers[0].role = ContainerRole::Init;
        request
    };
    let share = |percent| Request::share(Percent(percent), MiB(10));
    let check = |request: &PodRequest, percent, expected: Option<&str>| {
        let case = Case { request: request.clone(), ..Case::new(share(1)).with_limit(limit(percent)) };
        assert_eq!(case.reason().as_deref(), expected, "{percent}");
    };
    let alike = pod(share(60), share(30));
    check(&alike, 60, None);
    check(&alike, 59, Some("ExceedsGPUQuota: GPU compute"));
    // The main container fills GPU 0, where the init container does not fit.
    let mut state = node(&pcie_pairs(), &[]);
    state.add_usage(
        GpuIndex(0),
        GpuUsage { compute_percent: Percent(70), memory: MiB(100), ..GpuUsage::default() },
    );
    for (percent, expected) in [(90, None), (89, Some("ExceedsGPUQuota: GPU compute"))] {
        let limited = Case::new(share(1)).with_limit(limit(percent));
        let case = Case { request: alike.clone(), state: state.clone(), policy: Policy::Binpack, ..limited };
        assert_eq!(case.reason().as_deref(), expected, "{percent}");
    }
}

fn closed() -> NamespaceLimit {
    NamespaceLimit { gpus_by_model: Some(BTreeMap::new()), ..NamespaceLimit::default() }
}

#[test]
fn names_the_first_check_that_fails_in_every_entry_point() {
    let nine = || Case::new(Request::Whole(9));
    assert_eq!(Case::new(Request::Whole(8)).reason(), None);
    assert_eq!(nine().reason().as_deref(), Some("fewer than 9 GPUs"));
    let over_quota = Some("ExceedsGPUQuota: not a model of this namespace");
    assert_eq!(nine().with_limit(closed()).reason().as_deref(), over_quota);
    let unserved = Some("node does not offer this kind of GPU resource");
    assert_eq!(nine().with_limit(closed()).unserved().reason().as_deref(), unserved);
    let without_agent = Some("the agent of the node is being replaced, or was stopped");
    assert_eq!(Case::new(Request::Whole(1)).without_agent().reason().as_deref(), without_agent);
    assert_eq!(nine().with_limit(closed()).without_agent().reason().as_deref(), without_agent);
    let large = Case::new(Request::memory(MiB(1 << 20)));
    assert_eq!(large.reason().as_deref(), Some("no GPU has 1048576 MiB"));
}

/// An agent withdraws all devices of a full node, and the reason is that the node is full. A node with free GPUs and no
/// allocatable unit of the resource takes no pod either, because the kubelet would reject it.
#[test]
fn a_node_without_allocatable_units_takes_no_pod_and_names_the_true_reason() {
    let withdrawn = Some("node offers none of this GPU resource at the moment");
    assert_eq!(Case::new(Request::Whole(8)).withdrawn().reason().as_deref(), withdrawn);
    let nine = || Case::new(Request::Whole(9)).withdrawn();
    assert_eq!(nine().reason().as_deref(), Some("fewer than 9 GPUs"));
    let over_quota = Some("ExceedsGPUQuota: not a model of this namespace");
    assert_eq!(Case::new(Request::Whole(1)).withdrawn().with_limit(closed()).reason().as_deref(), over_quota);
    let mut full = Case::new(Request::memory(MiB(1))).withdrawn();
    (0..8)
        .for_each(|gpu| full.state.add_usage(GpuIndex(gpu), GpuUsage { whole: true, ..GpuUsage::default() }));
    assert_eq!(full.reason().as_deref(), Some("no GPU with 1 MiB left"));
    full.check(|admission| {
        assert_eq!(admission.quota_excess(), None, "kube-scheduler looks for no victims there")
    });
}

#[test]
fn explains_each_gpu_of_a_rejected_node() {
    let verdict = Case::new(Request::memory(MiB(20_000))).check(|admission| admission.verdict());
    let NodeVerdict::Rejected(rejection) = verdict else { panic!("{verdict:?}") };
    assert_eq!(rejection.container.as_deref(), Some("c0"));
    let short = GpuRejectReason::Memory { left: MiB(16_384), asked: MiB(20_000) };
    assert_eq!(rejection.gpus.len(), 8);
    assert!(rejection.gpus.iter().all(|(_, reason)| *reason == Some(short)));
}

#[test]
fn leaves_cpu_and_memory_to_kube_scheduler_unless_the_caller_asks_for_them() {
    let mut case = Case::new(Request::Whole(1));
    case.request.cpu = MilliCpu(1000);
    assert_eq!(case.reason(), None);
    let verdict = case.check(|admission| admission.verdict_with_host());
    assert_eq!(verdict, NodeVerdict::Rejected(RejectReason::Placement(PlacementError::Cpu).into()));
    case.request.cpu = MilliCpu::ZERO;
    case.request.memory = MiB(1);
    let verdict = case.check(|admission| admission.verdict_with_host());
    assert_eq!(verdict, NodeVerdict::Rejected(RejectReason::Placement(PlacementError::Memory).into()));
}

#[test]
fn returns_the_excess_over_the_quota_only_where_evictions_can_help() {
    let excess = |case: Case| case.check(|admission| admission.quota_excess());
    let limit = || NamespaceLimit { compute_percent: Some(150), ..NamespaceLimit::default() };
    let two = || Case::new(Request::Whole(2));
    assert_eq!(excess(two()), Some(GpuAmount::default()));
    let half = GpuAmount { compute_percent: 50, ..GpuAmount::default() };
    assert_eq!(excess(two().with_limit(limit())), Some(half));
    assert_eq!(excess(two().with_limit(closed())), None);
    assert_eq!(excess(two().unserved()), None);
}

#[test]
fn a_missing_node_is_unknown_or_unreadable() {
    let reason = |problem| RejectReason::of_missing_node(problem).to_string();
    assert_eq!(reason(None), "node is not known yet");
    assert_eq!(reason(Some("no GPUs listed")), "node cannot be read: no GPUs listed");
}
