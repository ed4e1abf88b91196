//! Checks `docs/reference/exit-codes.md` against the program.

use super::{help::COMMANDS, tessera};

/// Commands with their exit code. The page says in the row of the command what the code means.
const RUNS: [(&[&str], i32); 19] = [
    (&["place", "--topology", "dgx1.txt", "--request", "whole:2"], 0),
    (&["place", "--topology", "dgx1.txt", "--request", "whole:9"], 1),
    (&["place", "--topology", "none", "--request", "whole:2"], 2),
    (&["topology", "dgx1.txt"], 0),
    (&["topology", "none"], 2),
    (&["simulate", "topology", "--topology", "none"], 2),
    (&["simulate", "cluster", "--workload", "none"], 2),
    (&["inventory", "--gpus", "simulated:dgx1.txt"], 0),
    (&["inventory", "--gpus", "simulated:none"], 1),
    (&["inventory", "--gpus", "none"], 2),
    (&["metrics", "--gpus", "simulated:none"], 1),
    (&["metrics", "--listen", "here"], 2),
    (&["migrate", "check", "migrate/small-cluster.json"], 0),
    (&["migrate", "check", "migrate/mixed-cluster.json"], 1),
    (&["migrate", "check", "none"], 2),
    // A file cannot be a directory, also for root.
    (&["mount-grants", "--grants", "dgx1.txt/grants"], 2),
    (&["demo", "--nodes", "0"], 2),
    (&["agent", "--node-name", "n", "--listen", "here"], 2),
    (&["scheduler", "--listen", "here"], 2),
];

#[test]
fn the_page_of_exit_codes_is_true() {
    let page = include_str!("../../../../docs/reference/exit-codes.md");
    let row = |command: &str| {
        let name = format!("`tessera {command}");
        let is_named = |cell: &str| cell.split(&name).skip(1).any(|rest| rest.starts_with(['`', ' ']));
        let row = page.lines().find(|line| line.split('|').nth(1).is_some_and(is_named));
        row.unwrap_or_else(|| panic!("no row for {name}"))
    };
    for command in COMMANDS {
        row(command[0]);
    }
    for (arguments, code) in RUNS {
        let ran = tessera(arguments);
        assert_eq!(ran.status.code(), Some(code), "{arguments:?}: {}", String::from_utf8_lossy(&ran.stderr));
        let cell = row(arguments[0]).split('|').nth(2 + usize::try_from(code).unwrap()).unwrap().trim();
        assert!(!cell.is_empty(), "{arguments:?} exits with {code}, which the page does not explain");
    }
}
