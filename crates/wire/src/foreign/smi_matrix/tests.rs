use proptest::prelude::*;
use tessera_core::topology::PcieLevel;

use super::*;

/// Parses `text` and compares the cells above the diagonal, row by row.
fn check(text: &str, expected: &[&str]) -> SmiMatrix {
    let matrix = parse(text).unwrap_or_else(|error| panic!("{error}"));
    let links = matrix.topology.gpus().pairs().map(|(a, b)| matrix.topology.link(a, b));
    let cells: Vec<String> = links.map(|pair| link::abbreviation(pair).unwrap_or_default()).collect();
    assert_eq!(cells, expected);
    matrix
}

fn check_error(text: &str, expected: &str) {
    assert_eq!(parse(text).unwrap_err().to_string(), expected, "{text:?}");
}

#[test]
fn parses_tabs_escapes_nics_and_a_legend() {
    let text = "\u{1b}[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\u{1b}[0m\n\
        GPU0\t X \tNV18\tPIX\t0-55,112-167\t0\t\tN/A\n\
        GPU1\tNV18\t X \tNODE\t56-111\t1\t\tN/A\n\
        NIC0\tPIX\tNODE\t X \t\t\n\
        \n\
        Legend:\n\n  X    = Self\n  PIX  = whatever\n\nNIC Legend:\n\n  NIC0: mlx5_0\n";
    let matrix = check(text, &["NV18"]);
    assert_eq!(matrix.cpu_affinity, [Some("0-55,112-167".to_owned()), Some("56-111".to_owned())]);
    assert_eq!(matrix.topology.numa(GpuIndex(1)), Some(1));
}

#[test]
fn parses_blanks_and_nic_columns_between_gpus() {
    let text = "# a comment\n\
                        GPU0    GPU1    mlx5_0  GPU2    CPU Affinity\n\
                GPU0     X      PIX     PHB     SOC     0-9,20-29\n\
                GPU1    PIX      X      PHB     SOC     0-9,20-29\n\
                mlx5_0  PHB     PHB      X      SOC\n\
                GPU2    SOC     SOC     SOC      X      10-19,30-39\n";
    let matrix = check(text, &["PIX", "SYS", "SYS"]);
    assert_eq!(matrix.cpu_affinity[2].as_deref(), Some("10-19,30-39"));
    assert_eq!(matrix.topology.numa(GpuIndex(0)), None);
}

#[test]
fn parses_one_gpu_and_sixteen_gpus() {
    check("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n", &[]);
    let names: Vec<String> = (0..16).map(|number| format!("GPU{number}")).collect();
    let rows = names.iter().map(|row| {
        let cells = names.iter().map(|column| if row == column { " X " } else { "NV6" });
        format!("{row}\t{}\n", cells.collect::<Vec<_>>().join("\t"))
    });
    let text = format!("\t{}\n{}", names.join("\t"), rows.collect::<String>());
    let matrix = check(&text, &["NV6"; 120]);
    assert_eq!(matrix.topology.nvswitch_links(), Some(6));
}

#[test]
fn every_error_names_the_position_and_the_expected_text() {
    check_error("", "line 1, column 1: found nothing, expected a header line naming GPU0, GPU1, ...");
    check_error(
        "GPU0\tX\tSYS\n",
        "line 1, column 1: found `GPU0`, expected a header line naming GPU0, GPU1, ...",
    );
    check_error(
        "\tGPU0\tGPU2\n",
        "line 1, column 7: found `GPU2`, expected GPU1 (at most 64 GPUs, numbered in order)",
    );
    check_error(
        "\tGPU0\tGPU1\nGPU0\t X \tFAST\nGPU1\tSYS\t X \n",
        "line 2, column 10: found `FAST`, expected X, SYS, NODE, PHB, PXB, PIX, PSB, SOC or NV1 to NV18",
    );
    check_error(
        "\tGPU0\tGPU1\nGPU0\t X \n",
        "line 2, column 8: found nothing, expected 1 more cell for GPU0",
    );
    check_error(
        "\tGPU0\tGPU1\nGPU0\t X \tSYS\n\nLegend:\n",
        "line 5, column 1: found nothing, expected a row for GPU1",
    );
    check_error(
        "\tGPU0\tGPU1\nGPU0\t X \tSYS\nGPU1\tPHB\t X \n",
        "line 3, column 6: found `PHB`, expected SYS, as GPU0 has for GPU1",
    );
    check_error(
        "\tGPU0\tGPU1\nGPU0\tSYS\tSYS\nGPU1\tSYS\t X \n",
        "line 2, column 6: found `SYS`, expected X, the GPU itself",
    );
    check_error(
        "\tGPU0\tGPU1\nGPU0\t X \tX\nGPU1\tSYS\t X \n",
        "line 2, column 10: found `X`, expected a link: only GPU1 with itself is X",
    );
    check_error("\tGPU0\nGPU0\tX\nGPU0\tX\n", "line 3, column 1: found `GPU0`, expected each GPU once");
}

fn arbitrary_link() -> impl Strategy<Value = Link> {
    prop_oneof![
        Just(Link::default()),
        prop::sample::select(PcieLevel::ALL.to_vec()).prop_map(Link::pcie),
        (1..=18u8).prop_map(Link::nvlink),
    ]
}

proptest! {
    #[test]
    fn parses_its_own_output(
        count in 1usize..20,
        links in prop::collection::vec(arbitrary_link(), 400),
        numa in prop::collection::vec(prop::option::of(0u16..8), 20),
        cpus in prop::collection::vec(prop::option::of("[0-9]{1,2}-[0-9]{1,2}"), 20),
    ) {
        let topology = Topology::from_pairs(count, |a, b| links[a.position() * 20 + b.position()]);
        let matrix = SmiMatrix { topology: topology.with_numa(&numa), cpu_affinity: cpus[..count].to_vec() };
        let text = print(&matrix);
        prop_assert_eq!(parse(&text).unwrap(), matrix.clone());
        let with_blanks = text.replace('\t', "    ");
        prop_assert_eq!(parse(&with_blanks).unwrap(), matrix);
    }

    #[test]
    fn never_panics(text in ".{0,200}", lines in prop::collection::vec("(GPU[0-9]{1,3}|X|NV[0-9]{0,4}|SYS|\t| |\u{1b}\\[4m|CPU Affinity|\n){0,30}", 0..6)) {
        let _ = parse(&text);
        let _ = parse(&lines.join("\n"));
    }
}
