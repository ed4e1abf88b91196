//! Keeps the Chinese pages in step with the English ones.

use std::collections::BTreeSet;

use super::{links, read};

/// The pages that exist in both languages.
const PAIRS: [(&str, &str); 9] = [
    ("README.md", "docs/zh/readme.md"),
    ("docs/getting-started.md", "docs/zh/getting-started.md"),
    ("docs/tutorials.md", "docs/zh/tutorials.md"),
    ("docs/troubleshooting.md", "docs/zh/troubleshooting.md"),
    ("docs/migration.md", "docs/zh/migration.md"),
    ("docs/migrate-hami.md", "docs/zh/migrate-hami.md"),
    ("docs/migrate-gpushare.md", "docs/zh/migrate-gpushare.md"),
    ("docs/migrate-gpu-manager.md", "docs/zh/migrate-gpu-manager.md"),
    ("docs/migrate-nvidia.md", "docs/zh/migrate-nvidia.md"),
];

/// The parts of a page that are the same in every language.
#[derive(Debug, PartialEq)]
struct Skeleton {
    /// The level of each heading, with the number of table rows and of list items below it.
    sections: Vec<(usize, usize, usize)>,
    /// The code blocks, without comments.
    code: Vec<String>,
    /// The words in backticks below each heading. A row that says something else in one language has other words.
    words: Vec<BTreeSet<String>>,
    /// The files of the book that each section links to.
    linked: Vec<BTreeSet<String>>,
}

/// Returns whether a line begins an item of a numbered list.
fn is_numbered(line: &str) -> bool {
    line.split_once(". ").is_some_and(|(number, _)| number.parse::<u32>().is_ok())
}

/// Returns the README with paths in backticks in the place of links to files outside of the book. A page of the book
/// cannot link to them. The link to the translation becomes the path of the README, which the translation names.
fn as_in_the_book(text: &str) -> String {
    let mut parts = text.split('[');
    let mut found = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let link = part.split_once("](").and_then(|(_, rest)| rest.split_once(')'));
        match link {
            Some(("docs/zh/readme.md", rest)) => found += &format!("`README.md`{rest}"),
            Some((file, rest))
                if file.ends_with(".md") && !file.contains("://") && !file.starts_with("docs/") =>
            {
                found += &format!("`{file}`{rest}");
            }
            _ => {
                found.push('[');
                found += part;
            }
        }
    }
    found
}

fn skeleton(text: &str) -> Skeleton {
    let (mut sections, mut code) = (Vec::new(), Vec::new());
    let mut texts = vec![String::new()];
    let mut block: Option<String> = None;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            match block.take() {
                Some(done) => code.push(done),
                None => block = Some(String::new()),
            }
            continue;
        }
        if let Some(block) = &mut block {
            let command = line.split(" # ").next().unwrap_or_default();
            block.push_str(command.trim_end());
            block.push('\n');
            continue;
        }
        if line.starts_with('#') {
            sections.push((line.chars().take_while(|letter| *letter == '#').count(), 0, 0));
            texts.push(String::new());
        } else if let Some((_, rows, items)) = sections.last_mut() {
            *rows += usize::from(line.starts_with('|'));
            *items += usize::from(line.starts_with("- ") || is_numbered(line));
        }
        if let Some(text) = texts.last_mut() {
            text.push_str(line);
            text.push('\n');
        }
    }
    let words = texts.iter().map(|text| text.split('`').skip(1).step_by(2).map(str::to_owned).collect());
    let linked = texts.iter().map(|text| links(text).iter().filter_map(|link| page(link)).collect());
    Skeleton { words: words.collect(), linked: linked.collect(), sections, code }
}

/// Returns the name of the page of a link, or `None` for links to other sites and within the page. Pages in Chinese have
/// the name of their source.
fn page(link: &str) -> Option<String> {
    let file = link.split('#').next().filter(|file| file.ends_with(".md") && !file.contains("://"))?;
    file.rsplit('/').next().map(str::to_lowercase)
}

#[test]
fn both_languages_have_the_same_headings_tables_and_commands() {
    for (english, chinese) in PAIRS {
        let (mut source, translated) = (read(english), read(chinese));
        if english == "README.md" {
            source = as_in_the_book(&source);
        }
        let (source, translated) = (skeleton(&source), skeleton(&translated));
        assert_eq!(translated.sections, source.sections, "{chinese} has other sections than {english}");
        assert_eq!(translated.code, source.code, "{chinese} has other code than {english}");
        assert_eq!(translated.words, source.words, "{chinese} has other words in backticks than {english}");
        assert_eq!(translated.linked, source.linked, "{chinese} has other links than {english}");
    }
}

#[test]
fn the_skeleton_ignores_words_and_comments() {
    let english = "# A\n\nText.\n\n```\n$ run this  # a comment\n```\n\n| a | b |\n- one\n";
    let chinese = "# 甲\n\n文字。\n\n```\n$ run this  # 注释\n```\n\n| 甲 | 乙 |\n- 一\n";
    assert_eq!(skeleton(english), skeleton(chinese));
    assert_ne!(skeleton(english), skeleton(&chinese.replace("run this", "run that")));
    assert_ne!(skeleton(english), skeleton(&format!("{chinese}- 二\n")));
    assert_ne!(skeleton("# A\n\n`a` b\n"), skeleton("# 甲\n\n`b`\n"), "a sentence about something else");
    assert_ne!(skeleton("# A\n\n[a](b.md)\n"), skeleton("# 甲\n\n甲\n"), "a link is missing");
}
