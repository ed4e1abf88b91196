use proptest::prelude::*;

use super::*;
use crate::grant::Hold;
use crate::request::ContainerRole;
use crate::units::{GpuIndex, Percent};

fn taken(compute_percent: u64, memory: u64) -> GpuAmount {
    GpuAmount { compute_percent, memory: MiB(memory) }
}

fn quota(limit: NamespaceLimit) -> Quota {
    Quota { namespaces: BTreeMap::from([("team".to_owned(), limit)]), ..Quota::default() }
}

fn place(model: &str, pool: &str) -> QuotaLabels {
    QuotaLabels { model: Some(model.to_owned()), pool: Some(pool.to_owned()) }
}

#[test]
fn counts_as_gpu_admission_does() {
    let gpus_by_model = Some(BTreeMap::from([("M40".to_owned(), 1), ("P100".to_owned(), 0)]));
    let quota = quota(NamespaceLimit {
        gpus_by_model,
        pools: vec!["public".to_owned()],
        ..NamespaceLimit::default()
    });
    let mut usage = NamespaceUsage::default();
    usage.add("team", "M40", taken(60, 0));
    usage.add("other", "M40", taken(1000, 0));
    let ask =
        |place: &QuotaLabels, compute_percent| quota.allows("team", &usage, place, taken(compute_percent, 0));
    assert_eq!(ask(&place("M40", "public"), 40), Ok(()));
    assert_eq!(ask(&place("M40", "public"), 41), Err(OverQuota::GpuCount));
    assert_eq!(ask(&place("P100", "public"), 1), Err(OverQuota::GpuCount));
    assert_eq!(ask(&place("T4", "public"), 1), Err(OverQuota::Model));
    assert_eq!(ask(&place("M40", "wx"), 1), Err(OverQuota::Pool));
    assert_eq!(ask(&QuotaLabels::default(), 1), Err(OverQuota::Pool));
    assert_eq!(quota.allows("other", &usage, &QuotaLabels::default(), taken(999, 0)), Ok(()));
}

#[test]
fn limits_of_memory_and_compute_cover_all_models() {
    let limit =
        NamespaceLimit { memory: Some(MiB(100)), compute_percent: Some(150), ..NamespaceLimit::default() };
    let quota = quota(limit);
    let mut usage = NamespaceUsage::default();
    usage.add("team", "a", taken(70, 30));
    usage.add("team", "b", taken(30, 30));
    let ask = |more| quota.allows("team", &usage, &QuotaLabels::default(), more);
    assert_eq!(ask(taken(50, 40)), Ok(()));
    assert_eq!(ask(taken(51, 0)), Err(OverQuota::Compute));
    assert_eq!(ask(taken(0, 41)), Err(OverQuota::Memory));
}

#[test]
fn returns_the_amount_to_release_first() {
    let gpus_by_model = Some(BTreeMap::from([("M40".to_owned(), 1)]));
    let limits = NamespaceLimit {
        gpus_by_model,
        memory: Some(MiB(100)),
        compute_percent: Some(150),
        ..NamespaceLimit::default()
    };
    let quota = quota(limits);
    let mut usage = NamespaceUsage::default();
    usage.add("team", "M40", taken(80, 60));
    usage.add("team", "T4", taken(50, 20));
    let excess = |model: &str, more| quota.excess("team", &usage, &place(model, "any"), more);
    assert_eq!(excess("M40", taken(20, 20)), Some(taken(0, 0)));
    assert_eq!(excess("M40", taken(50, 30)), Some(taken(30, 10)));
    assert_eq!(excess("M40", taken(100, 0)), Some(taken(80, 0)));
    assert_eq!(excess("P100", taken(1, 0)), None, "a model that is closed");
    assert_eq!(quota.excess("other", &usage, &QuotaLabels::default(), taken(999, 0)), Some(taken(0, 0)));
    assert_eq!(quota.describe("team", &usage).unwrap(), "0.80 of 1 M40, 130% of 150%, 80 MiB of 100 MiB");
    assert_eq!(quota.describe("other", &usage), None);
}

#[test]
fn bounds_what_a_request_takes() {
    let node = crate::fixtures::node_of_memories(&[100, 200]);
    let most = |request| GpuAmount::peak_need(&PodRequest::of_mains([request]), &node);
    assert_eq!(most(Request::Whole(2)), taken(200, 400));
    assert_eq!(most(Request::share(Percent(30), MiB(10))), taken(30, 10));
    // The smaller GPU counts where the request fits on it, because the percentage is higher there.
    assert_eq!(most(Request::memory(MiB(51))), taken(51, 51));
    assert_eq!(most(Request::memory(MiB(150))), taken(75, 150));
}

/// A small container with guaranteed compute must not hide what another one of its pod may use.
#[test]
fn containers_without_guaranteed_compute_count_beside_others() {
    let node = crate::fixtures::node_of_memories(&[1000]);
    let container = |name: &str, role, compute_percent, memory| ContainerGrant {
        container: name.to_owned(),
        role,
        holds: vec![(
            GpuIndex(0),
            Hold::Share { compute_percent: Percent(compute_percent), memory: MiB(memory) },
        )],
    };
    let large = container("large", ContainerRole::Main, 0, 900);
    let small = container("small", ContainerRole::Main, 1, 10);
    let init = container("init", ContainerRole::Init, 0, 950);
    let of = |containers: &[&ContainerGrant]| {
        let containers: Vec<ContainerGrant> = containers.iter().map(|one| (*one).clone()).collect();
        GpuAmount::of_grants(&containers, &node)
    };
    assert_eq!(of(&[&large]), taken(90, 900));
    assert_eq!(of(&[&large, &small]), taken(91, 910));
    assert_eq!(of(&[&init, &large, &small]), taken(95, 950));
    let all = container("all", ContainerRole::Main, 60, 10);
    assert_eq!(of(&[&large, &all]), taken(100, 910), "a pod uses no more than the GPU");
}

proptest! {
    #[test]
    fn a_reversed_charge_leaves_no_trace(
        charges in prop::collection::vec((0..3usize, 0..3usize, 0u64..200, 0u64..200), 0..20),
    ) {
        let name = |number: usize| ["a", "b", "c"][number];
        let mut usage = NamespaceUsage::default();
        let (kept, gone) = charges.split_at(charges.len() / 2);
        for (namespace, model, compute_percent, memory) in kept.iter().chain(gone) {
            usage.add(name(*namespace), name(*model), taken(*compute_percent, *memory));
        }
        for (namespace, model, compute_percent, memory) in gone {
            usage.remove(name(*namespace), name(*model), taken(*compute_percent, *memory));
        }
        let mut expected = NamespaceUsage::default();
        for (namespace, model, compute_percent, memory) in kept {
            expected.add(name(*namespace), name(*model), taken(*compute_percent, *memory));
        }
        prop_assert_eq!(usage, expected);
    }
}

#[test]
fn unreadable_limits_block_only_their_namespaces() {
    let unreadable = UnreadableLimits::Of(BTreeMap::from([("broken".to_owned(), "mend it".to_owned())]));
    let limits = quota(NamespaceLimit { compute_percent: Some(100), ..NamespaceLimit::default() });
    let some = Quota { unreadable, ..limits.clone() };
    let all = Quota { unreadable: UnreadableLimits::All("mend it all".to_owned()), ..limits };
    let ask = |quota: &Quota, namespace: &str, compute_percent| {
        let asked = quota.allows(
            namespace,
            &NamespaceUsage::default(),
            &QuotaLabels::default(),
            taken(compute_percent, 0),
        );
        assert_eq!(quota.limits(namespace), quota.why_unreadable(namespace).is_some() || namespace == "team");
        assert_eq!(
            asked.as_ref().err().is_some_and(OverQuota::may_resolve),
            asked == Err(OverQuota::Compute)
        );
        asked
    };
    let closed = |why: &str| Err(OverQuota::Unreadable(why.to_owned()));
    assert_eq!(ask(&some, "broken", 0), closed("mend it"));
    assert_eq!(some.excess("broken", &NamespaceUsage::default(), &QuotaLabels::default(), taken(1, 0)), None);
    assert_eq!(ask(&some, "team", 100), Ok(()));
    assert_eq!(ask(&some, "team", 101), Err(OverQuota::Compute));
    assert_eq!(ask(&some, "free", 1000), Ok(()));
    for namespace in ["broken", "team", "free"] {
        assert_eq!(ask(&all, namespace, 0), closed("mend it all"));
    }
    assert_eq!(closed("mend it").unwrap_err().to_string(), "ExceedsGPUQuota: mend it");
}
