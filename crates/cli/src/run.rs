//! From a question to its answer on the screen.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail};
use tessera_cluster::list::unschedulable;
use tessera_wire::foreign::inspect::{ShareView, TopologyView};
use tessera_wire::tessera::explanation::PodExplanation;

use crate::args::{Arguments, Command, Explain, Form, Question, Top, Tree, View, WhatIf};
use crate::document::{self, Document};
use crate::explain::{self, Answer};
use crate::follow::{follow, redraw};
use crate::options::{Reach, Selecting};
use crate::paint::Paint;
use crate::plugin::Plugin;
use crate::share::ShareTable;
use crate::survey::Survey;
use crate::top::Usage;
use crate::{load, print, show, what_if};

/// How long an agent may take.
const AGENT_WITHIN: Duration = Duration::from_secs(2);

/// Who asks, and where the answer goes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Context {
    pub(crate) plugin: Plugin,
    pub(crate) paint: Paint,
    pub(crate) terminal: bool,
}

pub(crate) async fn run(arguments: Arguments, context: Context) -> Result<ExitCode> {
    let Arguments { reach, question } = arguments;
    match question {
        Question::View(view) => match &reach.endpoint {
            Some(endpoint) => view_by_scheduler(endpoint, &reach, &view, context).await,
            None => view_by_api(&reach, &view, context).await,
        },
        Question::More(Command::Explain(asked)) => explain_pod(&reach, &asked, context).await,
        Question::More(Command::WhatIf(asked)) => suppose(&reach, &asked, context).await,
        Question::More(Command::Tree(asked)) => tree(&reach, &asked).await,
        Question::More(Command::Top(asked)) => top(&reach, &asked, context).await,
    }
}

async fn view_by_api(reach: &Reach, view: &View, context: Context) -> Result<ExitCode> {
    let client = load::client(reach).await?;
    let survey = load::survey(&client, reach, &view.selecting).await?;
    if let Some(problem) = nothing(&survey, &view.selecting, context.plugin) {
        problem?;
    }
    for (node, facts) in &survey.nodes {
        if let Some(problem) = &facts.problem {
            eprintln!("warning: node {node} cannot be read and is left out: {problem}");
        }
    }
    if view.output == Some(Form::Json) && !view.watch {
        document::write_json(&Document::new(&survey, context.plugin == Plugin::Share))?;
        return Ok(ExitCode::SUCCESS);
    }
    let text = render(&survey, view, context)?;
    if view.watch {
        return follow(client, reach, view, context, text).await;
    }
    print(&text);
    Ok(ExitCode::SUCCESS)
}

/// What to say where there is nothing to show: of a named node it is an error, of all it is not.
fn nothing(survey: &Survey, selecting: &Selecting, plugin: Plugin) -> Option<Result<()>> {
    let shown = match plugin {
        Plugin::Gpu => survey.with_gpus().count(),
        Plugin::Share => survey.sharing().count(),
    };
    if shown > 0 {
        return None;
    }
    let kind = if plugin == Plugin::Gpu { "GPU" } else { "GPU memory to share (aliyun.com/gpu-mem)" };
    if let (Some(node), Some(facts)) = (&selecting.node, survey.nodes.values().next()) {
        return Some(Err(match &facts.problem {
            Some(problem) => anyhow!("node {node:?} cannot be read: {problem}"),
            None => anyhow!("node {node:?} offers no {kind}"),
        }));
    }
    eprintln!("No node offers {kind}. Nodes do once a device plugin or agent runs on them.");
    Some(Ok(()))
}

pub(crate) fn render(survey: &Survey, view: &View, context: Context) -> Result<String> {
    let headers = !view.no_headers;
    let sharing = context.plugin == Plugin::Share;
    Ok(match (view.output, context.plugin) {
        (Some(form @ (Form::Json | Form::Yaml)), _) => {
            document::print(&Document::new(survey, sharing), form)?
        }
        (Some(Form::Name), Plugin::Gpu) => {
            names(survey.with_gpus().map(|(_, state)| state.node().name.to_string()))
        }
        (Some(Form::Name), Plugin::Share) => {
            names(survey.sharing().map(|(_, state)| state.node().name.to_string()))
        }
        (Some(Form::Wide), Plugin::Gpu) => show::topology::wide(survey, headers),
        (None, Plugin::Gpu) if view.details => show::topology::details(&show::topology::view(survey, true)),
        (None, Plugin::Gpu) if survey.with_gpus().next().is_none() => String::new(),
        (None, Plugin::Gpu) => show::topology::summary(&show::topology::view(survey, false), headers),
        (form, Plugin::Share) => share_text(&ShareTable::of(survey), view, form),
    })
}

fn share_text(table: &ShareTable, view: &View, form: Option<Form>) -> String {
    if view.details {
        return show::share::details(table);
    }
    let columns = show::share::Columns { headers: !view.no_headers, wide: form == Some(Form::Wide) };
    show::share::summary(table, columns)
}

fn names(nodes: impl Iterator<Item = String>) -> String {
    nodes.map(|name| format!("node/{name}\n")).collect()
}

async fn view_by_scheduler(endpoint: &str, reach: &Reach, view: &View, context: Context) -> Result<ExitCode> {
    if view.watch || view.selecting.selector.is_some() || view.selecting.field_selector.is_some() {
        bail!("a scheduler shows all its nodes once; leave --watch and the selectors out, or --endpoint");
    }
    let node = view.selecting.node.as_ref().map(|node| format!("/{node}")).unwrap_or_default();
    let text = match context.plugin {
        Plugin::Gpu => {
            let detail = if view.details || view.output.is_some() { "?detail=true" } else { "" };
            let path = format!("/inspect{node}{detail}");
            let mut found: TopologyView =
                load::from_scheduler(endpoint, "/gputopology-scheduler", &path).await?;
            found.nodes.sort_by(|a, b| a.name.cmp(&b.name));
            match view.output {
                Some(form @ (Form::Json | Form::Yaml)) => document::print(&found, form)?,
                Some(Form::Name) => names(found.nodes.into_iter().map(|node| node.name)),
                _ if view.details => show::topology::details(&found),
                _ => show::topology::summary(&found, !view.no_headers),
            }
        }
        Plugin::Share => {
            let path = format!("/inspect{node}");
            let found: ShareView = load::from_scheduler(endpoint, "/gpushare-scheduler", &path).await?;
            match view.output {
                Some(form @ (Form::Json | Form::Yaml)) => document::print(&found, form)?,
                Some(Form::Name) => names(found.nodes.into_iter().map(|node| node.name)),
                form => share_text(&ShareTable::of_view(&found, load::unit(reach)), view, form),
            }
        }
    };
    print(&text);
    Ok(ExitCode::SUCCESS)
}

async fn explain_pod(reach: &Reach, asked: &Explain, context: Context) -> Result<ExitCode> {
    let (namespace, name) = match asked.pod.split_once('/') {
        Some(("pod" | "pods", name)) => (asked.namespace.clone(), name),
        Some((namespace, name)) => (Some(namespace.to_owned()), name),
        None => (asked.namespace.clone(), asked.pod.as_str()),
    };
    let answer = match &reach.endpoint {
        Some(endpoint) => {
            let namespace = namespace.unwrap_or_else(|| "default".to_owned());
            let explanation: PodExplanation =
                load::from_scheduler(endpoint, "", &format!("/explain/{namespace}/{name}")).await?;
            Answer {
                asks: Vec::new(),
                explanation,
                holds: Vec::new(),
                remedies: Vec::new(),
                smaller: Vec::new(),
                kube_scheduler: None,
            }
        }
        None => {
            let client = load::client(reach).await?;
            let namespace = namespace.unwrap_or_else(|| client.default_namespace().to_owned());
            let pod = load::pod(&client, &namespace, name).await?;
            if matches!(pod.status.phase.as_str(), "Succeeded" | "Failed") {
                bail!("pod {namespace}/{name} has ended ({}) and holds nothing", pod.status.phase);
            }
            if !pod.spec.asks_for_gpus() {
                bail!("pod {namespace}/{name} asks for no GPU; `kubectl describe pod` tells the rest");
            }
            let survey = load::survey(&client, reach, &Selecting::default()).await?;
            let mut answer = explain::explain(&survey, &pod)
                .with_context(|| format!("pod {namespace}/{name} cannot be served as it is written"))?;
            answer.kube_scheduler = unschedulable(&client, &namespace, name).await?;
            answer
        }
    };
    print(&match asked.output {
        Some(form @ (Form::Json | Form::Yaml)) => document::print(&answer, form)?,
        Some(Form::Name) => names(fitting(&answer)),
        form => show::explain::pod(&answer, form == Some(Form::Wide), context.paint),
    });
    Ok(ExitCode::SUCCESS)
}

/// Names of the nodes that would do.
fn fitting(answer: &Answer) -> impl Iterator<Item = String> + '_ {
    answer.explanation.nodes.iter().filter(|view| view.fits).map(|view| view.node.clone())
}

async fn suppose(reach: &Reach, asked: &WhatIf, context: Context) -> Result<ExitCode> {
    if reach.endpoint.is_some() {
        bail!("what-if is worked out here, from what the API server tells; leave --endpoint out");
    }
    what_if::pod("default", &asked.request)?;
    let client = load::client(reach).await?;
    let namespace = asked.namespace.clone().unwrap_or_else(|| client.default_namespace().to_owned());
    let pod = what_if::pod(&namespace, &asked.request)?;
    let survey = load::survey(&client, reach, &Selecting::default()).await?;
    let answer = explain::explain(&survey, &pod)?;
    let rooms = what_if::room(&survey, &pod)?;
    print(&match asked.output {
        Some(form @ (Form::Json | Form::Yaml)) => {
            let mut value = serde_json::to_value(&answer)?;
            value["room"] = serde_json::to_value(&rooms)?;
            document::print(&value, form)?
        }
        Some(Form::Name) => names(fitting(&answer)),
        form => show::explain::what_if(&answer, &rooms, form == Some(Form::Wide), context.paint),
    });
    let fits = fitting(&answer).next().is_some();
    Ok(if fits { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn tree(reach: &Reach, asked: &Tree) -> Result<ExitCode> {
    let client = load::client(reach).await?;
    let survey = load::survey(&client, reach, &asked.selecting).await?;
    if let Some(problem) = nothing(&survey, &asked.selecting, Plugin::Gpu) {
        problem?;
    }
    let used = match asked.no_agents {
        true => Default::default(),
        false => load::agents(&survey, AGENT_WITHIN).await,
    };
    for (node, answer) in &used {
        if let Err(why) = answer {
            eprintln!("warning: node {node}: usedMemory is not known and shown as 0: {why}");
        }
    }
    let several = survey.with_gpus().count() > 1;
    for (_, state) in survey.with_gpus() {
        let name = state.node().name.to_string();
        if several {
            print(&format!("{name}\n"));
        }
        let used = used.get(&name).and_then(|answer| answer.as_ref().ok());
        print(&show::tree::node(&survey, state, used, asked.output.is_some()));
    }
    Ok(ExitCode::SUCCESS)
}

async fn top(reach: &Reach, asked: &Top, context: Context) -> Result<ExitCode> {
    let client = load::client(reach).await?;
    let form = asked.output.as_deref().map(|form| if form == "yaml" { Form::Yaml } else { Form::Json });
    let refresh = context.terminal && !asked.once && form.is_none();
    loop {
        let survey = load::survey(&client, reach, &asked.selecting).await?;
        if let Some(problem) = nothing(&survey, &asked.selecting, Plugin::Gpu) {
            problem?;
            return Ok(ExitCode::SUCCESS);
        }
        let usage = Usage::new(load::agents(&survey, AGENT_WITHIN).await);
        let text = match form {
            Some(form) => document::print(&usage, form)?,
            None => show::top::table(&usage, !asked.no_headers, context.paint),
        };
        if !refresh {
            print(&text);
            return Ok(ExitCode::SUCCESS);
        }
        redraw(&text, context);
        tokio::time::sleep(Duration::from_secs(asked.interval)).await;
    }
}
