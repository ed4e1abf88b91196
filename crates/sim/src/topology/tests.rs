use std::path::Path;

use tessera_core::topology::{Link, PcieLevel};
use tessera_wire::smi_matrix;

use super::*;

/// A DGX-1 with V100.
fn dgx1() -> Topology {
    smi_matrix::parse(include_str!("../../../tessera/tests/fixtures/dgx1.txt")).unwrap().topology
}

/// Two sockets with two switches of two GPUs each.
fn two_sockets() -> Topology {
    let topology = Topology::from_pairs(8, |a, b| {
        Link::pcie(match (a.0 / 2 == b.0 / 2, a.0 / 4 == b.0 / 4) {
            (true, _) => PcieLevel::SingleSwitch,
            (false, true) => PcieLevel::HostBridge,
            (false, false) => PcieLevel::System,
        })
    });
    topology.with_numa(&[0, 0, 0, 0, 1, 1, 1, 1].map(Some))
}

fn share(topology: &Topology, rule: Rule) -> f64 {
    bandwidth_share(topology, rule, 300, 5).unwrap()
}

#[test]
fn the_published_columns_come_out() {
    let check = |topology: &Topology, rule, expected: f64| {
        let share = share(topology, rule);
        assert!((share - expected).abs() < 0.004, "{rule}: {share:.4}, published {expected}");
    };
    check(&dgx1(), Rule::Lowest, 0.573);
    check(&dgx1(), Rule::Tree, 0.692);
    check(&dgx1(), Rule::Gpuallocator, 0.748);
    check(&dgx1(), Rule::Greedy, 0.861);
    check(&dgx1(), Rule::Preserve, 0.873);
}

#[test]
fn ours_is_ahead_of_every_other() {
    for topology in [dgx1(), two_sockets()] {
        let ours = share(&topology, Rule::Tessera);
        for rule in Rule::ALL {
            assert!(share(&topology, rule) <= ours + 0.0005, "{rule} is better");
        }
    }
}

#[test]
fn every_size_of_machine_is_served() {
    for count in [1, 2, 3, 17] {
        let topology = Topology::from_pairs(count, |_, _| Link::nvlink(4));
        for rule in Rule::ALL.into_iter().filter(|rule| rule.serves(&topology)) {
            let share = bandwidth_share(&topology, rule, 20, 1).unwrap();
            assert!((share - 1.0).abs() < 1e-9, "{rule} on {count} GPUs: {share}");
        }
    }
    let error = bandwidth_share(&Topology::unknown(17), Rule::Greedy, 20, 1).unwrap_err();
    let expected = "policy greedy compares every set of GPUs, which takes too long for more than 16";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn every_name_is_a_rule_of_that_name() {
    for rule in Rule::ALL {
        assert_eq!(rule.name().parse(), Ok(rule));
    }
    for name in Rule::COMPARED {
        assert!(name.parse::<Rule>().is_ok(), "{name}");
    }
    let error = "best".parse::<Rule>().unwrap_err().to_string();
    assert_eq!(
        error,
        "unknown policy \"best\"; choose from random, lowest, tree, gpuallocator, greedy, preserve, tessera"
    );
}

/// The best of the columns published for machines whose matrices may lie beside the repository.
const PUBLISHED: [(&str, f64); 10] = [
    ("dgx1-v100", 0.873),
    ("v100-cloud-permuted", 0.868),
    ("dgx1-p100", 0.888),
    ("rtx8000x4-bridge", 1.0),
    ("a100-pcie-bridge8", 0.984),
    ("pcie8-2socket-pix", 0.984),
    ("pcie8-1root-p40", 0.998),
    ("pcie8-phb-cloud", 1.0),
    ("dgx-a100", 1.0),
    ("dgx-h100", 1.0),
];

#[test]
fn at_least_what_the_best_published_rule_reaches() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/topologies");
    if !folder.is_dir() {
        println!("skipped: {} is not there", folder.display());
        return;
    }
    for (name, published) in PUBLISHED {
        let text = std::fs::read_to_string(folder.join(format!("{name}.txt"))).unwrap();
        let topology = smi_matrix::parse(&text).unwrap().topology;
        let share = share(&topology, Rule::Tessera);
        assert!(share >= published - 0.005, "{name}: {share:.4}, published {published}");
    }
}
