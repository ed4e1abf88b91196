//! Command lines of the programs that Tessera replaces, as their manifests pass them: gpu-manager and
//! gpushare's device plugin for `tessera agent`; gpu-admission and the extenders of gputopology and
//! gpushare for `tessera scheduler`.
//!
//! Flags may have `_` for `-` and one dash for two, and some have no effect here. Flags with the
//! same meaning as one of ours are aliases of it. The variables `EXTRA_FLAGS` and `LOG_LEVEL` count as
//! flags.

use std::collections::BTreeSet;
use std::ffi::OsString;

/// An accepted flag without effect: the name, whether its value is a separate word, and the reason.
type WithoutEffect = (&'static str, bool, &'static str);

/// Flags of both commands, most of them of the logging library of the originals.
const OF_BOTH: &[WithoutEffect] = &[
    ("add-dir-header", false, "logs name the module"),
    ("alsologtostderr", false, "logs go to standard error"),
    ("incluster-mode", false, "it is detected"),
    ("log-backtrace-at", true, "--log sets what is logged"),
    ("log-dir", true, "logs go to standard error"),
    ("log-file", true, "logs go to standard error"),
    ("log-file-max-size", true, "logs go to standard error"),
    ("log-flush-frequency", true, "logs are not buffered"),
    ("logtostderr", false, "logs go to standard error"),
    ("skip-headers", false, "every line has a time and a level"),
    ("skip-log-headers", false, "logs go to standard error"),
    ("stderrthreshold", true, "--log sets what is logged"),
    ("vmodule", true, "--log sets what is logged"),
];

const OF_SCHEDULER: &[WithoutEffect] =
    &[("master", true, "--kubeconfig or the pod's service account names the API server")];

const OF_AGENT: &[WithoutEffect] = &[
    ("allocation-check-period", true, "allocations are compared at every change"),
    ("cgroup-driver", true, "it is detected"),
    ("checkpoint-path", true, "the kubelet's podresources API is used"),
    ("client-cert", true, "the kubelet is reached through its sockets"),
    ("client-key", true, "the kubelet is reached through its sockets"),
    ("container-runtime-endpoint", true, "the container runtime is not called"),
    ("docker-endpoint", true, "the container runtime is not called"),
    ("kubelet-address", true, "the kubelet is reached through its sockets"),
    ("kubelet-port", true, "the kubelet is reached through its sockets"),
    ("mps", false, "it never had an effect"),
    ("query-kubelet", false, "the kubelet is reached through its sockets"),
    ("runtime-request-timeout", true, "the container runtime is not called"),
    ("standalone", false, "the API server is required"),
    ("timeout", true, "the kubelet is reached through its sockets"),
    ("token", true, "the kubelet is reached through its sockets"),
    ("wait-timeout", true, "the agent retries until it can serve; /readyz reports what is missing"),
];

/// Flags with another name now.
pub(crate) const RENAMED: &[(&str, &str)] =
    &[("pprofAddress", "pprof-address"), ("sample-period", "sample-every")];

/// Flags whose empty value means in the originals that they are not given.
const ABSENT_IF_EMPTY: &[&str] =
    &["extra-config", "hostname-override", "kubeconfig", "policy", "volume-config"];

/// Variable with further flags, as the start scripts of gpu-manager and gpu-admission append them.
pub(crate) const EXTRA_FLAGS: &str = "EXTRA_FLAGS";

/// Hidden flag that collects the flags without effect.
const COLLECTED: &str = "--no-effect";

/// Translates a command line to the current flags. `variable` returns a variable of the environment.
pub(crate) fn translate(
    words: impl IntoIterator<Item = OsString>,
    variable: impl Fn(&str) -> Option<String>,
) -> Vec<OsString> {
    let mut words = words.into_iter();
    let mut translated: Vec<OsString> = words.by_ref().take(2).collect();
    let Some(own) = translated.get(1).and_then(|command| without_effect(command.to_str()?)) else {
        translated.extend(words);
        return translated;
    };
    let extra = variable(EXTRA_FLAGS).unwrap_or_default();
    let mut words = words.chain(extra.split_whitespace().map(OsString::from)).peekable();
    let mut verbosity = variable("LOG_LEVEL");
    while let Some(word) = words.next() {
        let Some(flag) = word.to_str().and_then(Flag::read) else {
            translated.push(word);
            continue;
        };
        if flag.name == "v" {
            let next = || words.next().and_then(|word| word.into_string().ok());
            verbosity = flag.value.map(str::to_owned).or_else(next);
            continue;
        }
        if ABSENT_IF_EMPTY.contains(&flag.name.as_str()) {
            let is_separate = flag.value.is_none() && words.next_if(|word| word.is_empty()).is_some();
            if is_separate || flag.value == Some("") {
                continue;
            }
        }
        if flag.name == "version" {
            if flag.value == Some("false") {
                continue;
            }
            translated.truncate(1);
            translated.push("--version".into());
            return translated;
        }
        let known = own.iter().chain(OF_BOTH).find(|(name, ..)| *name == flag.name);
        match known {
            Some((name, takes_value, _)) => {
                if *takes_value && flag.value.is_none() {
                    words.next();
                }
                translated.push(format!("{COLLECTED}={name}").into());
            }
            None => translated.push(flag.print().into()),
        }
    }
    let is_filter = |word: &OsString| word == "--log" || word.to_string_lossy().starts_with("--log=");
    let has_filter = translated.iter().any(is_filter) || variable("TESSERA_LOG").is_some();
    if let Some(filter) = verbosity.as_deref().and_then(log_filter).filter(|_| !has_filter) {
        translated.push(format!("--log={filter}").into());
    }
    translated
}

/// Returns the flags without effect of a command that replaces other programs.
fn without_effect(command: &str) -> Option<&'static [WithoutEffect]> {
    match command {
        "agent" => Some(OF_AGENT),
        "scheduler" => Some(OF_SCHEDULER),
        _ => None,
    }
}

/// Returns our filter for a level of the originals: a number of klog, or a word of the extenders. Details
/// of the libraries below us are never wanted with it.
fn log_filter(level: &str) -> Option<&'static str> {
    const DETAILED: &str = "info,tessera=debug";
    if let Ok(number) = level.parse::<u8>() {
        return Some(if number < 4 { "info" } else { DETAILED });
    }
    match level.to_ascii_lowercase().as_str() {
        "trace" | "debug" => Some(DETAILED),
        "info" => Some("info"),
        "warn" | "warning" => Some("warn"),
        "error" | "alert" => Some("error"),
        _ => None,
    }
}

/// Logs once for each of these flags that it has no effect, and why.
pub(crate) fn log_without_effect(names: &[String]) {
    let names: BTreeSet<&String> = names.iter().collect();
    for name in names {
        tracing::info!(flag = name, reason = why(name), "this flag has no effect");
    }
}

/// Returns the reason why a flag has no effect.
pub(crate) fn why(name: &str) -> &'static str {
    let mut all = OF_AGENT.iter().chain(OF_SCHEDULER).chain(OF_BOTH);
    all.find(|(known, ..)| *known == name).map_or("it is unknown", |(.., why)| why)
}

#[derive(Debug)]
struct Flag<'a> {
    name: String,
    value: Option<&'a str>,
}

impl<'a> Flag<'a> {
    /// Parses `--name` and `--name=value`, also with one dash. Single letters that are not an old
    /// flag are left alone.
    fn read(word: &'a str) -> Option<Self> {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let bare = name.strip_prefix("--").or_else(|| name.strip_prefix('-'))?;
        let is_ours = !name.starts_with("--") && bare.len() == 1 && bare != "v";
        let name = bare.replace('_', "-");
        let renamed = RENAMED.iter().find(|(old, _)| *old == name);
        let name = renamed.map_or(name, |(_, new)| (*new).to_owned());
        (!bare.is_empty() && !is_ours).then_some(Self { name, value })
    }

    fn print(&self) -> String {
        match self.value {
            Some(value) => format!("--{}={value}", self.name),
            None => format!("--{}", self.name),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn check(line: &str, expected: &str) {
        let words = format!("tessera {line}");
        let translated = translate(words.split(' ').map(OsString::from), |_| None);
        let joined: Vec<&str> = translated.iter().skip(1).filter_map(|word| word.to_str()).collect();
        assert_eq!(joined.join(" "), expected);
    }

    #[test]
    fn translates_the_flags_of_the_original_manifests() {
        check("agent --sample_period=1", "agent --sample-every=1");
        check(
            "agent --share-mode=true --query-addr=0.0.0.0 --extra-config=/etc/gpu-manager/extra-config.json --hostname-override=n --log-dir=/var/log --v=5",
            "agent --share-mode=true --query-addr=0.0.0.0 --extra-config=/etc/gpu-manager/extra-config.json --hostname-override=n --no-effect=log-dir --log=info,tessera=debug",
        );
        check(
            "agent -logtostderr --v 5 --memory-unit=MiB",
            "agent --no-effect=logtostderr --memory-unit=MiB --log=info,tessera=debug",
        );
        check(
            "agent --node_labels a_b=c_d --virtual_manager_path=/x_y",
            "agent --node-labels a_b=c_d --virtual-manager-path=/x_y",
        );
        check(
            "agent -mps -query-kubelet --token abc --health-check",
            "agent --no-effect=mps --no-effect=query-kubelet --no-effect=token --health-check",
        );
    }

    #[test]
    fn flags_with_an_empty_value_are_absent_where_the_originals_mean_that() {
        check("agent --hostname-override= --kubeconfig= --driver=", "agent --driver=");
        check("agent --extra-config= --volume-config  --v=4", "agent --log=info,tessera=debug");
        check("scheduler -kubeconfig= --address=:1", "scheduler --address=:1");
        check("scheduler -policy  --config=f", "scheduler --config=f");
        check("scheduler -policy", "scheduler --policy");
    }

    #[test]
    fn translates_the_command_lines_of_the_original_extenders() {
        check(
            "scheduler -policy static -config /etc/kubernetes/static-node.json",
            "scheduler --policy static --config /etc/kubernetes/static-node.json",
        );
        check(
            "scheduler --address=0.0.0.0:3456 --v=4 --config=/etc/kubernetes/gpu-quota-admission.config \
             --incluster-mode=false --logtostderr=true --pprofAddress 127.0.0.1:3457",
            "scheduler --address=0.0.0.0:3456 --config=/etc/kubernetes/gpu-quota-admission.config \
             --no-effect=incluster-mode --no-effect=logtostderr --pprof-address 127.0.0.1:3457 --log=info,tessera=debug",
        );
    }

    /// The programs link klog, which adds its flags to their command lines.
    #[test]
    fn flags_of_klog_have_no_effect() {
        for command in ["agent", "scheduler"] {
            check(
                &format!(
                    "{command} --log_file=/var/log/x --log_file_max_size 1800 --skip_headers --add_dir_header=true \
                     --log-flush-frequency 5s"
                ),
                &format!(
                    "{command} --no-effect=log-file --no-effect=log-file-max-size --no-effect=skip-headers \
                     --no-effect=add-dir-header --no-effect=log-flush-frequency"
                ),
            );
        }
        assert!(why("wait-timeout").contains("/readyz"), "{}", why("wait-timeout"));
    }

    #[test]
    fn variables_of_the_original_manifests_count_as_flags() {
        let with = |set: &[(&str, &str)], line: &str| {
            let set: BTreeMap<String, String> =
                set.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let words = translate(line.split(' ').map(OsString::from), |name| set.get(name).cloned());
            words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
        };
        let set = [("LOG_LEVEL", "4"), ("EXTRA_FLAGS", "--incluster-mode=false -policy simple")];
        assert_eq!(
            with(&set, "tessera scheduler"),
            "tessera scheduler --no-effect=incluster-mode --policy simple --log=info,tessera=debug"
        );
        assert_eq!(with(&[("LOG_LEVEL", "WARNING")], "tessera agent"), "tessera agent --log=warn");
        assert_eq!(with(&[("LOG_LEVEL", "5")], "tessera agent --log error"), "tessera agent --log error");
        assert_eq!(with(&[("LOG_LEVEL", "5"), ("TESSERA_LOG", "info")], "tessera agent"), "tessera agent");
        assert_eq!(with(&set, "tessera place"), "tessera place");
    }

    #[test]
    fn version_prints_that_of_the_program() {
        check("agent --v=5 --version", "--version");
        check("scheduler --version=raw", "--version");
        check("scheduler --version=false --policy simple", "scheduler --policy simple");
        check("place --version", "place --version");
    }

    #[test]
    fn leaves_everything_else_unchanged() {
        check("agent -h", "agent -h");
        check("agent --gpus simulated:a_b -- --mps", "agent --gpus simulated:a_b -- --no-effect=mps");
        check("place --v_x 5", "place --v_x 5");
        check("agent", "agent");
    }
}
