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
    view.set_node(node_of_memories(memories), labels(), []);
    view
}

fn labels() -> QuotaLabels {
    QuotaLabels { model: Some("T4".to_owned()), pool: None }
}

fn gpus(view: &ClusterView, uid: &str) -> GpuSet {
    let grant = view.ledger().grant(&uid.into()).unwrap();
    grant.gpus()
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
    view.set_node(node_of_memories(&[100]), labels(), []);
    assert_eq!(compute_percent(&view), 50);
}

#[test]
fn a_booking_is_charged_and_a_conflict_changes_nothing() {
    let mut view = view(&[100]);
    let grant = |uid: &str| {
        let PodGpus::Granted(containers) = granted(0, Hold::Whole) else { panic!() };
        PodGrant { pod: uid.into(), node: "node".into(), cpu: MilliCpu(1), memory: MiB(1), containers }
    };
    view.book(grant("a"), "team".to_owned()).unwrap();
    assert_eq!(compute_percent(&view), 100);
    assert!(view.book(grant("b"), "team".to_owned()).is_err());
    assert_eq!(compute_percent(&view), 100);
    view.remove_pod(&"a".into());
    assert_eq!(view.usage(), &NamespaceUsage::default());
}

#[test]
fn a_booking_in_doubt_keeps_its_gpu_but_is_not_charged() {
    let mut view = view(&[100, 100]);
    let PodGpus::Granted(containers) = granted(0, Hold::Whole) else { panic!() };
    let grant =
        PodGrant { pod: "a".into(), node: "node".into(), cpu: MilliCpu(1), memory: MiB(1), containers };
    view.book(grant.clone(), "team".to_owned()).unwrap();
    view.put_in_doubt(&"a".into());
    view.set_pod(pod("bypass", unknown(Request::Whole(1))));
    assert_eq!((gpus(&view, "bypass").to_string().as_str(), compute_percent(&view)), ("1", 100));
    // The pod is booked a second time, and then the watch shows that the first Binding failed.
    view.remove_pod(&"bypass".into());
    let PodGpus::Granted(containers) = granted(1, Hold::Whole) else { panic!() };
    view.book(PodGrant { containers, ..grant }, "team".to_owned()).unwrap();
    view.set_pod(pod("bypass", unknown(Request::Whole(1))));
    assert!(gpus(&view, "bypass").is_empty(), "both GPUs are taken");
    view.release_in_doubt(&"a".into());
    assert_eq!((gpus(&view, "bypass").to_string().as_str(), compute_percent(&view)), ("0", 200));
}

#[test]
fn a_pod_without_gpus_leaves_the_guesses_alone() {
    let mut view = view(&[100]);
    view.set_pod(pod("bypass", unknown(Request::Whole(1))));
    view.set_pod(pod("plain", PodGpus::NotRequested));
    let before = view.ledger().last_change();
    view.set_pod(pod("plain", PodGpus::NotRequested));
    assert_eq!(view.ledger().last_change(), before);
}

fn any_gpus() -> impl Strategy<Value = PodGpus> {
    let share = |percent: u32| Request::share(Percent(percent), MiB(percent.into()));
    prop_oneof![
        Just(PodGpus::NotRequested),
        (0u8..3, 1u32..100).prop_map(move |(gpu, percent)| granted(gpu, Hold::of(share(percent), MiB::ZERO))),
        (1u32..100).prop_map(move |percent| unknown(share(percent))),
        (1u8..3).prop_map(|count| unknown(Request::Whole(count))),
    ]
}

/// One change of a node with three GPUs and of its pods.
#[derive(Clone, Debug)]
enum Step {
    Set(u8, PodGpus),
    Remove(u8),
    /// The node changes, and all pods are read again.
    Node([u64; 3]),
    NodeGone,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u8..6, any_gpus()).prop_map(|(number, gpus)| Step::Set(number, gpus)),
        2 => (0u8..6).prop_map(Step::Remove),
        1 => [50u64..=100, 50u64..=100, 50u64..=100].prop_map(Step::Node),
        1 => Just(Step::NodeGone),
    ]
}

proptest! {
    #[test]
    fn any_history_leads_to_the_view_of_the_pods_that_are_left(
        steps in prop::collection::vec(any_step(), 0..30),
    ) {
        let mut memories = Some([100, 100, 50]);
        let mut incremental = view(&[100, 100, 50]);
        let mut left = BTreeMap::new();
        for step in steps {
            match step {
                Step::Set(number, gpus) => {
                    let changed = pod(&format!("p{number}"), gpus);
                    incremental.set_pod(changed.clone());
                    left.insert(number, changed);
                }
                Step::Remove(number) => {
                    incremental.remove_pod(&PodUid(format!("p{number}")));
                    left.remove(&number);
                }
                Step::Node(changed) => {
                    incremental.set_node(node_of_memories(&changed), labels(), left.values().cloned());
                    memories = Some(changed);
                }
                Step::NodeGone => {
                    incremental.remove_node(&"node".into());
                    memories = None;
                }
            }
        }
        let mut at_once = memories.map_or_else(ClusterView::default, |memories| view(&memories));
        left.into_values().for_each(|pod| at_once.note_pod(pod));
        at_once.settle_all();
        let node = NodeName::from("node");
        prop_assert_eq!(incremental.ledger().node(&node), at_once.ledger().node(&node));
        prop_assert_eq!(incremental.usage(), at_once.usage());
        let unknown = |view: &ClusterView| view.unknown_pods(&node).map(|(uid, _)| uid.clone()).collect::<Vec<_>>();
        prop_assert_eq!(unknown(&incremental), unknown(&at_once));
        let grants = |view: &ClusterView| view.ledger().grants_on(&node).cloned().collect::<Vec<_>>();
        if memories.is_some() {
            prop_assert_eq!(grants(&incremental), grants(&at_once));
        }
    }
}
