"""Make texts/*.txt: short English and Chinese texts about five topics, made of the patterns and words below.

    python -m train.samples.make_texts [folder]      (default: texts/ beside this file)

The same lines come out each time, none of them twice. Nothing was copied: the patterns and words were invented here.
"""

import random
import sys
from pathlib import Path

NUMBERS = {"train": 900, "dev": 150, "test": 150}
SEED = 20261121

# label -> (pattern, words for its slots): {a}, {b} and {c} take one word each
PATTERNS: dict[str, list[tuple[str, dict[str, str]]]] = {
    "sports": [
        ("{a} won the {b} by {c}", {
         "a": "The home team|Our club|The young goalkeeper|Last year's champion|The visitors",
         "b": "match|final|relay race|derby|cup tie",
         "c": "two goals|a single point|ten seconds|three sets|penalties"}),
        ("The coach says that {a} will {b} before the {c}", {
         "a": "the striker|both runners|the whole squad|her best swimmer",
         "b": "train twice a day|rest|be fit again|change the tactics",
         "c": "semi-final|marathon|away game|Olympics"}),
        ("{a}在{b}中{c}", {
         "a": "主队|年轻的门将|去年的冠军|我们的女排|这位前锋",
         "b": "决赛|昨晚的比赛|接力赛|客场比赛|预选赛",
         "c": "打进两球|以一分险胜|刷新了纪录|因伤退场|逆转取胜"}),
        ("教练表示，{a}将{b}，备战{c}", {
         "a": "全队|两名主力|新来的中锋|游泳队",
         "b": "加强训练|休息三天|调整战术|提前集合",
         "c": "马拉松|下一轮联赛|奥运会|半决赛"}),
    ],
    "weather": [
        ("{a} is expected {b}, with {c}", {"a": "Heavy rain|Light snow|Thick fog|A warm front|Thunder",
         "b": "this evening|in the north|along the coast|before dawn|at the weekend",
         "c": "gusts up to 80 km/h|temperatures near zero|clear spells later|high humidity|flooded roads"}),
        ("It will stay {a} {b}; {c}", {"a": "dry|cloudy|stormy|mild|frosty",
         "b": "until Friday|in the valleys|all day|overnight",
         "c": "take an umbrella|the sun returns on Sunday|ice may form on bridges|the wind turns to the west"}),
        ("{a}{b}将有{c}", {"a": "今天夜间|明天白天|周末|未来三天|清晨", "b": "北部地区|沿海一带|山区|本市|长江中下游",
         "c": "大雨|小雪转晴|浓雾|六级大风|雷阵雨"}),
        ("气象台提醒：{a}，{b}，{c}", {"a": "气温下降|湿度较大|午后有雷电|台风正在靠近",
         "b": "最低零下五度|能见度不足百米|阵风八级|局部有冰雹",
         "c": "请注意保暖|出门请带伞|请减少外出|驾车请减速"}),
    ],
    "food": [
        ("{a} the {b} with {c}", {"a": "Fry|Slowly simmer|Season|Stir|Bake",
         "b": "noodles|chicken|sliced onions|dough|mushrooms",
         "c": "garlic and ginger|a spoonful of soy sauce|fresh herbs|plenty of butter|a pinch of salt"}),
        ("This {a} serves the best {b} and {c}", {"a": "small restaurant|bakery|night market|tea house|family kitchen",
         "b": "dumplings|rice porridge|apple cake|spicy tofu|roast duck",
         "c": "jasmine tea|pickled cabbage|sweet bean soup|warm bread"}),
        ("把{a}切好，加入{b}，{c}", {"a": "土豆|牛肉|豆腐|青椒|蘑菇", "b": "酱油和姜丝|一勺糖|蒜末|少许盐|料酒",
         "c": "小火炖半小时|大火翻炒|蒸十分钟|拌匀即可|烤至金黄"}),
        ("这家{a}的{b}{c}", {"a": "小餐馆|面包店|夜市摊位|茶楼|火锅店", "b": "饺子|红烧肉|绿豆汤|麻婆豆腐|苹果派",
         "c": "又香又嫩|味道很正宗|甜而不腻|辣得过瘾|分量十足"}),
    ],
    "technology": [
        ("The new {a} {b} {c}", {"a": "laptop|compiler|phone|processor|operating system",
         "b": "needs half the memory of|runs faster than|fixes a bug of|supports the drivers of", "c":
         "its predecessor|the version of last spring|the test release|its rivals"}),
        ("Engineers {a} a {b} that {c}", {"a": "released|patched|published|benchmarked",
         "b": "network driver|neural network|database|web browser|chip",
         "c": "uses less power|encrypts every message|runs on one graphics card|loads pages in parallel"}),
        ("新款{a}{b}，{c}", {"a": "处理器|手机|笔记本电脑|显卡|操作系统",
         "b": "采用三纳米工艺|内存翻倍|支持无线充电|功耗降低一半|修复了漏洞",
         "c": "下月上市|性能提升明显|售价尚未公布|程序员可抢先测试"}),
        ("工程师{a}了{b}，{c}", {"a": "发布|升级|开源|测试", "b": "数据库软件|神经网络模型|网络驱动|浏览器内核",
         "c": "速度快了三成|代码可免费下载|支持并行计算|所有消息均加密"}),
    ],
    "travel": [
        ("We {a} to {b} and {c}", {"a": "took the night train|flew|cycled|sailed|drove",
         "b": "the old harbour|a village in the mountains|Lisbon|Kyoto|the island",
         "c": "stayed in a small hotel|visited two museums|lost our luggage|walked along the city wall"}),
        ("The {a} to {b} {c}", {"a": "ferry|guided tour|bus ticket|hiking trail|flight",
         "b": "the castle|the southern beaches|the lake|the capital|the temple",
         "c": "must be booked in advance|takes three hours|starts at platform two|costs nothing for children"}),
        ("我们{a}去{b}，{c}", {"a": "坐夜车|乘飞机|骑自行车|坐船|自驾", "b": "古城|海边的小岛|桂林|山里的村庄|敦煌",
         "c": "住在一家民宿|参观了两座博物馆|拍了很多照片|沿着城墙散步"}),
        ("{a}的{b}{c}", {"a": "去灯塔|前往首都|到温泉|环湖|进山", "b": "旅游专线|船票|航班|徒步路线|导游团",
         "c": "需要提前预订|全程三小时|儿童免票|从二号站台出发|周一停运"}),
    ],
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    chance = random.Random(SEED)
    lines: list[str] = []
    each = sum(NUMBERS.values()) // len(PATTERNS)
    for label, patterns in PATTERNS.items():
        texts: dict[str, None] = {}  # keeps its order, unlike a set
        while len(texts) < each:
            pattern, words = patterns[len(texts) % len(patterns)]
            texts[pattern.format(**{slot: chance.choice(choices.split("|")) for slot, choices in words.items()})] = None
        lines += [f"{label}\t{text}\n" for text in texts]
    chance.shuffle(lines)
    for name, count in NUMBERS.items():
        (folder / f"{name}.txt").write_text("".join(lines[:count]), encoding="utf-8")
        del lines[:count]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "texts")
