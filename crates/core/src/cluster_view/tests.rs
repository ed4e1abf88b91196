use proptest::prelude::*;

use super::*;
use crate::fixtures::node_of_memories;
use crate::gpu_set::GpuSet;
use crate::grant::Hold;
use crate::request::{ContainerRole, Request};
use crate::units::{GpuIndex, Percent};

fn pod(uid: &str, gpus: PodGpus) -> PlacedPod {
    PlacedPod {
        uid: uid.into(),
        namespace: "team".to_owned(),
        node: "node".into(),
        cpu: MilliCpu(100),
        memory: MiB(10),
        gpus,
    }
}

fn granted(gpu: u8, hold: Hold) -> PodGpus {
    PodGpus::Granted(vec![ContainerGrant {
        container: "c0".to_owned(),
        role: ContainerRole::Main,
        holds: vec![(GpuIndex(gpu), hold)],
    }])
}

fn unknown(request: Request) -> PodGpus {
    PodGpus::Unknown(PodRequest::of_mains([request]))
}

fn view(memories: &[u64]) -> ClusterView {
    let mut view = ClusterView::default();
    let labels = QuotaLabels { model: Some("T4".to_owned()), pool: None };
    view.set_node(node_of_memories(memories), labels);
    view
}

fn gpus(view: &ClusterView, uid: &str) -> GpuSet {
    let grant = view.ledger().grant(&uid.into()).unwrap();
    grant.containers.iter().map(ContainerGrant::gpus).fold(GpuSet::EMPTY, GpuSet::union)
}

fn compute_percent(view: &ClusterView) -> u64 {
    view.usage().of_model("team", "T4").compute_percent
}

#[test]
fn moves_the_guess_when_a_granted_pod_needs_the_gpu() {
    let mut view = view(&[100, 100]);
    view.set_pod(pod("bypass", unknown(Request::Whole(1))));
    assert_eq!(gpus(&view, "bypass").to_string(), "0");
    view.set_pod(pod("ours", granted(0, Hold::Whole)));
    assert_eq!(gpus(&view, "bypass").to_string(), "1");
    assert!(view.ledger().overbooked().is_empty());
    assert_eq!(compute_percent(&view), 200);
    view.remove_pod(&"ours".into());
    assert_eq!(gpus(&view, "bypass").to_string(), "0");
    assert_eq!(compute_percent(&view), 100);
}

#[test]
fn drops_the_guess_once_the_annotations_name_the_gpu() {
    let mut view = view(&[100, 100]);
    view.set_pod(pod("bypass", unknown(Request::Whole(1))));
    assert!(view.is_set_aside(view.ledger().grant(&"bypass".into()).unwrap()));
    assert_eq!(view.unknown_pods(&"node".into()).count(), 1);
    view.set_pod(pod("bypass", granted(1, Hold::Whole)));
    assert_eq!(gpus(&view, "bypass").to_string(), "1");
    assert!(!view.is_set_aside(view.ledger().grant(&"bypass".into()).unwrap()));
}

#[test]
fn counts_only_cpu_and_memory_of_a_pod_without_gpus() {
    let mut view = view(&[100]);
    view.set_pod(pod("plain", PodGpus::NotRequested));
    let state = view.ledger().node(&"node".into()).unwrap();
    assert_eq!((state.cpu_left(), state.memory_left()), (MilliCpu(900), MiB(990)));
    assert_eq!(state.idle().len(), 1);
    assert_eq!(view.usage(), &NamespaceUsage::default());
}

#[test]
fn charges_nothing_for_a_node_that_is_gone_and_charges_again_when_it_returns() {
    let mut view = view(&[100]);
    let half = Hold::Share { compute_percent: Percent(50), memory: MiB(20) };
    view.set_pod(pod("ours", granted(0, half)));
    assert_eq!(compute_percent(&view), 50);
    view.remove_node(&"node".into());
    assert_eq!(view.usage(), &NamespaceUsage::default());
    view.set_node(node_of_memories(&[100]), QuotaLabels { model: Some("T4".to_owned()), pool: None });
    assert_eq!(compute_percent(&view), 50);
}

#[test]
fn a_booking_is_charged_and_a_conflict_changes_nothing() {
    let mut view = view(&[100]);
    let grant = |uid: &str| {
        let PodGpus::Granted(containers) = granted(0, Hold::Whole) else { panic!() };
        PodGrant { pod: uid.into(), node: "node".into(), cpu: MilliCpu(1), memory: MiB(1), containers }
    };
    view.book(grant("a"), "team").unwrap();
    assert_eq!(compute_percent(&view), 100);
    assert!(view.book(grant("b"), "team").is_err());
    assert_eq!(compute_percent(&view), 100);
    view.remove_pod(&"a".into());
    assert_eq!(view.usage(), &NamespaceUsage::default());
}

fn any_gpus() -> impl Strategy<Value = PodGpus> {
    let share =
        |percent: u32| Request::Share { compute_percent: Percent(percent), memory: MiB(percent.into()) };
    prop_oneof![
        Just(PodGpus::NotRequested),
        (0u8..3, 1u32..100).prop_map(move |(gpu, percent)| granted(gpu, Hold::of(share(percent)))),
        (1u32..100).prop_map(move |percent| unknown(share(percent))),
        (1u8..3).prop_map(|count| unknown(Request::Whole(count))),
    ]
}

proptest! {
    #[test]
    fn any_history_leads_to_the_view_of_the_pods_that_are_left(
        steps in prop::collection::vec((0u8..6, prop::option::weighted(0.7, any_gpus())), 0..30),
    ) {
        let mut incremental = view(&[100, 100, 50]);
        let mut left = BTreeMap::new();
        for (number, gpus) in steps {
            let uid = format!("p{number}");
            match gpus {
                Some(gpus) => {
                    incremental.set_pod(pod(&uid, gpus.clone()));
                    left.insert(uid, gpus);
                }
                None => {
                    incremental.remove_pod(&uid.as_str().into());
                    left.remove(&uid);
                }
            }
        }
        let mut at_once = view(&[100, 100, 50]);
        left.into_iter().for_each(|(uid, gpus)| at_once.note_pod(pod(&uid, gpus)));
        at_once.settle_all();
        let node = NodeName::from("node");
        prop_assert_eq!(incremental.ledger().node(&node), at_once.ledger().node(&node));
        prop_assert_eq!(incremental.usage(), at_once.usage());
        let grants = |view: &ClusterView| view.ledger().grants_on(&node).cloned().collect::<Vec<_>>();
        prop_assert_eq!(grants(&incremental), grants(&at_once));
    }
}
