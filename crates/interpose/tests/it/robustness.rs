//! Kills, forks, damaged and hostile files.

use tessera_limits::files;
use tessera_limits::memory_account::ProcessIdentity;
use tessera_limits::process_stat::ProcessStat;

use crate::support::{CONTEXT, Container, Tenant, until, write_at};

#[test]
fn the_memory_of_a_killed_process_is_released() {
    let container = Container::with_memory(4096);
    let mut survivor = container.begun("proc");
    for round in 0..20 {
        let mut victim = container.begun(["link", "dlsym", "proc"][round % 3]);
        assert_eq!(victim.ask("take plain 2500"), "0");
        victim.child.kill().unwrap();
        victim.child.wait().unwrap();
    }
    assert_eq!(survivor.ask("take plain 3500"), "0");
    assert!(container.most() <= 4096);
}

/// Kills a process, and returns once all of its threads have ended. Its parent has not reaped it.
fn kill_and_leave_unreaped(victim: &mut Tenant) {
    victim.child.kill().unwrap();
    let process = ProcessIdentity { id: victim.child.id(), started_ticks: 0 };
    let stat = format!("/proc/{}/stat", process.id);
    until(|| !ProcessStat::parse(&std::fs::read(&stat).unwrap()).unwrap().is_running(process));
}

/// A program that sizes its caches by free memory asks once, and so does nvidia-smi. Nothing ran
/// between the death and the question that could have noted the death.
#[test]
fn free_memory_is_right_at_the_first_question_after_a_death() {
    for is_reaped in [true, false] {
        let container = Container::with_memory(4096);
        let mut victim = container.begun("proc");
        assert_eq!(victim.ask("take plain 3000"), "0");
        kill_and_leave_unreaped(&mut victim);
        if is_reaped {
            victim.child.wait().unwrap();
        }
        assert_eq!(container.watched(), "0: 4096 4096 0, 4096 4096 0, no driver", "reaped: {is_reaped}");
        let mut victim_of_program = container.begun("dlsym");
        assert_eq!(victim_of_program.ask("info"), format!("{} 4096 4096", 4096 - CONTEXT));
        assert_eq!(victim_of_program.ask("take plain 3000"), "0");
        kill_and_leave_unreaped(&mut victim_of_program);
        let mut next = container.begun("link");
        assert_eq!(next.ask("info"), format!("{} 4096 4096", 4096 - CONTEXT), "reaped: {is_reaped}");
        assert_eq!(next.ask("take plain 3500"), "0", "what is shown as free can be allocated");
        assert!(container.most() <= 4096, "{} taken", container.most());
        for mut dead in [victim, victim_of_program] {
            dead.child.wait().unwrap();
        }
    }
}

/// A process that replaces its program keeps its process id, and its memory is freed.
#[test]
fn free_memory_is_right_after_a_process_has_replaced_its_program() {
    let container = Container::with_memory(4096);
    let mut tenant = container.begun("proc");
    assert_eq!(tenant.ask("take plain 3000"), "0");
    assert_eq!(tenant.ask("exec"), "0");
    assert_eq!(tenant.ask("begin"), "0");
    assert_eq!(tenant.ask("info"), format!("{} 4096 4096", 4096 - CONTEXT));
    assert_eq!(tenant.ask("take plain 3500"), "0");
    assert!(container.most() <= 4096);
}

/// Kills processes at random points while they allocate and free, beside a process that allocates
/// and frees all the time. Each kill takes about 20 ms.
const KILLS: usize = 1_000;

#[test]
fn kills_at_any_point_cause_no_leak_no_hang_and_no_excess() {
    let container = Container::with_memory(8192);
    let mut survivor = container.begun("proc");
    survivor.tell("race plain 512 100000");
    let mut running: Vec<_> = (0..4).map(|_| container.start("dlsym")).collect();
    for (round, way) in ["plain", "async", "vmm", "pitch"].iter().cycle().take(KILLS).enumerate() {
        let mut victim = std::mem::replace(&mut running[round % 4], container.start("link"));
        victim.tell("begin");
        victim.tell(&format!("churn {way} 64"));
        if round % 3 > 0 {
            // Some processes are killed during their work, the others while they start.
            victim.answer();
        }
        (0..round * 7919 % 40_000).for_each(|_| std::hint::spin_loop());
        victim.child.kill().unwrap();
        victim.child.wait().unwrap();
    }
    for mut idle in running {
        idle.child.kill().unwrap();
        idle.child.wait().unwrap();
    }
    assert!(survivor.answer().parse::<u64>().unwrap() > 0);
    assert_eq!(survivor.ask("fill plain 64"), format!("{} 2", (8192 - CONTEXT) / 64), "all is back");
    assert!(container.most() <= 8192, "{} taken", container.most());
}

#[test]
fn forked_children_have_their_own_slots() {
    let container = Container::with_memory(4096);
    let mut parent = container.start("proc");
    assert_eq!(parent.ask("fork x 1000"), "0", "a child before the parent");
    assert_eq!(parent.ask("fork x 5000"), "2", "a child is limited too");
    assert_eq!(parent.ask("begin"), "0");
    assert_eq!(parent.ask("take plain 3000"), "0");
    assert_eq!(parent.ask("fork x 10"), "3", "a child after the parent is refused by the driver");
    assert_eq!(
        parent.ask("fill plain 64"),
        format!("{} 2", (4096 - CONTEXT - 3000) / 64),
        "the parent still holds"
    );
}

#[test]
fn rejects_every_use_without_valid_limits_and_logs_one_line() {
    for damage in ["absent", "short", "bits", "version", "account"] {
        let container = Container::with_memory(4096);
        let control = files::control_path(&container.grant());
        match damage {
            "absent" => std::fs::remove_file(&control).unwrap(),
            "short" => std::fs::write(&control, "short").unwrap(),
            "account" => std::fs::write(files::account_path(&container.grant()), "short").unwrap(),
            "version" => write_at(&control, 0, b"tessera9"),
            _ => (24..2_000).step_by(8).for_each(|place| write_at(&control, place, &[0xff; 8])),
        }
        let mut tenant = container.start("link");
        assert_eq!(tenant.ask("begin"), "800", "{damage}");
        assert_eq!(tenant.ask("take plain 1"), "800", "{damage}");
        assert_eq!(tenant.ask("take async 1"), "3", "{damage}: the driver was never initialised");
        let said = tenant.end();
        assert_eq!(said.lines().count(), 1, "{damage}: {said}");
        assert!(said.starts_with("tessera: cannot load this container's GPU limits"), "{damage}: {said}");
    }
}

#[test]
fn an_invalid_account_harms_only_its_container() {
    let container = Container::with_memory(4096);
    let mut tenant = container.begun("proc");
    let account = files::account_path(&container.grant());
    let length = account.metadata().unwrap().len();
    // Everything but the first word, which is the format, is overwritten.
    for place in (8..length).step_by(8) {
        write_at(&account, place, &[0xff; 8]);
    }
    let answer = tenant.ask("take plain 64");
    assert!(["0", "2"].contains(&answer.as_str()), "{answer}");
    tenant.ask("info");
    for place in (8..length).step_by(8) {
        write_at(&account, place, &[0; 8]);
    }
    tenant.ask("fill plain 64");
    assert!(container.most() <= 4096, "{} taken after the account was wiped", container.most());
}

#[test]
fn a_mounted_grant_takes_precedence_over_the_environment_variable() {
    // The check needs a host with a mounted grant. On other hosts the variable is used.
    if std::path::Path::new("/etc/tessera").exists() {
        let container = Container::with_memory(4096);
        assert_ne!(container.start("proc").ask("begin"), "0");
    }
}
