use std::sync::Arc;

use super::*;
use crate::gpu::Gpu;
use crate::grant::PodGrant;
use crate::ledger::Ledger;
use crate::node::Node;
use crate::topology::{Link, Topology};
use crate::units::{MiB, MilliCpu, Percent};

const MEMORY: MiB = MiB(16_384);
const ANY: Exchange = Exchange::SameKind { distinct: false };

/// Returns a node of four GPUs. NVLinks join 0 with 3 and 1 with 2.
fn pairs() -> Node {
    let links = |a: GpuIndex, b: GpuIndex| if a.0 + b.0 == 3 { Link::nvlink(2) } else { Link::default() };
    let gpu = |i: u8| Gpu::new(GpuIndex(i), format!("GPU-{i}").as_str().into(), "V100".into(), MEMORY);
    let topology = Topology::from_pairs(4, links);
    Node::new("n".into(), (0..4).map(gpu).collect(), topology, MilliCpu(8000), MiB(65_536)).unwrap()
}

fn part(request: &str, gpus: &[u8], hold: Hold) -> ClaimPart {
    ClaimPart { request: request.to_owned(), gpus: gpus.iter().copied().map(GpuIndex).collect(), hold }
}

fn share(percent: u32) -> Hold {
    Hold::Share { compute_percent: Percent(percent), memory: MiB(u64::from(percent) * MEMORY.0 / 100) }
}

fn review_of(node: &NodeState, parts: &[ClaimPart], exchange: Exchange) -> Review {
    let policy: Policy = "tessera".parse().unwrap();
    review(node, parts, exchange, &policy, LinkSensitivity::Sensitive)
}

fn replaced(review: Review) -> (Vec<u8>, Replacement) {
    let Review::Replace { parts, why } = review else { panic!("{review:?}") };
    (parts.iter().flat_map(|part| &part.gpus).map(|gpu| gpu.0).collect(), why)
}

#[test]
fn a_set_with_bad_links_is_replaced() {
    let node = NodeState::empty(Arc::new(pairs()));
    let first_fit = [part("r", &[0, 1], Hold::Whole)];
    assert_eq!(replaced(review_of(&node, &first_fit, ANY)), (vec![0, 3], Replacement::BetterLinks));
    assert_eq!(review_of(&node, &first_fit, Exchange::None), Review::Keep);
    assert_eq!(review_of(&node, &[part("r", &[1, 2], Hold::Whole)], ANY), Review::Keep);
    let insensitive = review(&node, &first_fit, ANY, &Policy::Simple, LinkSensitivity::Insensitive);
    assert_eq!(insensitive, Review::Keep);
}

/// Jobs that do not depend on links leave the linked pairs to others.
#[test]
fn an_insensitive_set_leaves_the_links_to_others() {
    let mut node = crate::fixtures::node(&crate::fixtures::bridged_pairs(), &[]);
    [3, 5, 6, 7].into_iter().for_each(|gpu| node.add_usage(GpuIndex(gpu), GpuUsage::of(Hold::Whole)));
    let linked = [part("r", &[0, 1], Hold::Whole)];
    let policy: Policy = "tessera".parse().unwrap();
    let review = review(&node, &linked, ANY, &policy, LinkSensitivity::Insensitive);
    assert_eq!(replaced(review), (vec![2, 4], Replacement::LinksOfOthers));
}

#[test]
fn a_stale_proposal_moves_to_a_gpu_with_room() {
    let mut node = NodeState::empty(Arc::new(pairs()));
    node.add_usage(GpuIndex(0), GpuUsage::of(share(90)));
    let stale = [part("r", &[0], share(30))];
    let (gpus, why) = replaced(review_of(&node, &stale, ANY));
    assert!(gpus != [0] && why == Replacement::NoRoom, "{gpus:?}");
    assert_eq!(review_of(&node, &stale, Exchange::None), Review::NoRoom(GpuIndex(0)));
    assert_eq!(review_of(&node, &[part("r", &[0], share(10))], ANY), Review::Keep, "a share that fits stays");
    (1..4).for_each(|gpu| node.add_usage(GpuIndex(gpu), GpuUsage::of(Hold::Whole)));
    assert_eq!(review_of(&node, &stale, ANY), Review::NoRoom(GpuIndex(0)));
}

#[test]
fn requests_of_one_claim_add_up_and_may_have_to_differ() {
    let node = NodeState::empty(Arc::new(pairs()));
    let both = [part("a", &[0], share(60)), part("b", &[0], share(60))];
    let (gpus, _) = replaced(review_of(&node, &both, ANY));
    assert_ne!(gpus[0], gpus[1]);
    let two = [part("a", &[0], share(50)), part("b", &[0], share(50))];
    assert_eq!(review_of(&node, &two, ANY), Review::Keep);
    assert_eq!(grants(&two).len(), 2);
}

#[test]
fn gpus_of_another_kind_take_no_place() {
    let gpu =
        |i: u8, model: &str| Gpu::new(GpuIndex(i), format!("GPU-{i}").as_str().into(), model.into(), MEMORY);
    let gpus = vec![gpu(0, "A"), gpu(1, "B")];
    let node = Node::new("n".into(), gpus, Topology::unknown(2), MilliCpu(8000), MiB(65_536)).unwrap();
    let mut node = NodeState::empty(Arc::new(node));
    node.add_usage(GpuIndex(0), GpuUsage::of(Hold::Whole));
    assert_eq!(review_of(&node, &[part("r", &[0], share(30))], ANY), Review::NoRoom(GpuIndex(0)));
}

proptest::proptest! {
    /// Whatever is proposed, what follows from the reviews fits the ledger, which refuses what exceeds a GPU.
    #[test]
    fn reviewed_claims_never_exceed_a_gpu(
        proposals in proptest::collection::vec((0u8..4, 1u32..=100, 1usize..=3, proptest::bool::ANY), 1..40)
    ) {
        let mut ledger = Ledger::default();
        ledger.set_node(pairs());
        for (number, (gpu, percent, count, fixed)) in proposals.into_iter().enumerate() {
            let gpus: Vec<u8> = (0..4).map(|step| (gpu + step) % 4).take(count).collect();
            let hold = if percent == 100 { Hold::Whole } else { share(percent) };
            let proposal = [part("r", &gpus, hold)];
            let exchange = if fixed { Exchange::None } else { ANY };
            let parts = match review_of(ledger.node(&"n".into()).unwrap(), &proposal, exchange) {
                Review::Keep => proposal.to_vec(),
                Review::Replace { parts, .. } => parts,
                Review::NoRoom(_) => continue,
            };
            proptest::prop_assert_eq!(parts[0].gpus.len(), count);
            let grant = PodGrant {
                pod: ClaimUid(number.to_string()).holder(),
                node: "n".into(),
                cpu: MilliCpu::ZERO,
                memory: MiB::ZERO,
                containers: grants(&parts),
            };
            proptest::prop_assert!(ledger.book(grant).is_ok());
            proptest::prop_assert!(ledger.overbooked().is_empty());
        }
    }
}
