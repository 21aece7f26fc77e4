"""Make texts/*.txt: short English and Chinese texts about five topics, made of the patterns and words below.

    python -m train.samples.make_texts [folder]      (default: texts/ beside this file)

The same lines come out each time, none of them twice. Nothing was copied: the patterns and words were invented here.
"""

import random
import re
import sys
from pathlib import Path

NUMBERS = {"train": 900, "dev": 150, "test": 150}
SEED = 20261121

# Label -> patterns: one of the choices in each pair of braces is taken
PATTERNS: dict[str, list[str]] = {
    "sports": [
        "{The home team|Our club|The young goalkeeper|Last year's champion|The visitors}"
        " won the {match|final|relay race|derby|cup tie}"
        " by {two goals|a single point|ten seconds|three sets|penalties}",
        "The coach says that {the striker|both runners|the whole squad|her best swimmer}"
        " will {train twice a day|rest|be fit again|change the tactics}"
        " before the {semi-final|marathon|away game|Olympics}",
        "{主队|年轻的门将|去年的冠军|我们的女排|这位前锋}在{决赛|昨晚的比赛|接力赛|客场比赛|预选赛}中{打进两球|以一分险胜|刷新了纪录|因伤退场|逆转取胜}",
        "教练表示，{全队|两名主力|新来的中锋|游泳队}将{加强训练|休息三天|调整战术|提前集合}，备战{马拉松|下一轮联赛|奥运会|半决赛}",
    ],
    "weather": [
        "{Heavy rain|Light snow|Thick fog|A warm front|Thunder}"
        " is expected {this evening|in the north|along the coast|before dawn|at the weekend}"
        ", with {gusts up to 80 km/h|temperatures near zero|clear spells later|high humidity|flooded roads}",
        "It will stay {dry|cloudy|stormy|mild|frosty} {until Friday|in the valleys|all day|overnight}"
        "; {take an umbrella|the sun returns on Sunday|ice may form on bridges|the wind turns to the west}",
        "{今天夜间|明天白天|周末|未来三天|清晨}{北部地区|沿海一带|山区|本市|长江中下游}将有{大雨|小雪转晴|浓雾|六级大风|雷阵雨}",
        "气象台提醒：{气温下降|湿度较大|午后有雷电|台风正在靠近}，{最低零下五度|能见度不足百米|阵风八级|局部有冰雹}，{请注意保暖|出门请带伞|请减少外出|驾车请减速}",
    ],
    "food": [
        "{Fry|Slowly simmer|Season|Stir|Bake} the {noodles|chicken|sliced onions|dough|mushrooms}"
        " with {garlic and ginger|a spoonful of soy sauce|fresh herbs|plenty of butter|a pinch of salt}",
        "This {small restaurant|bakery|night market|tea house|family kitchen}"
        " serves the best {dumplings|rice porridge|apple cake|spicy tofu|roast duck}"
        " and {jasmine tea|pickled cabbage|sweet bean soup|warm bread}",
        "把{土豆|牛肉|豆腐|青椒|蘑菇}切好，加入{酱油和姜丝|一勺糖|蒜末|少许盐|料酒}，{小火炖半小时|大火翻炒|蒸十分钟|拌匀即可|烤至金黄}",
        "这家{小餐馆|面包店|夜市摊位|茶楼|火锅店}的{饺子|红烧肉|绿豆汤|麻婆豆腐|苹果派}{又香又嫩|味道很正宗|甜而不腻|辣得过瘾|分量十足}",
    ],
    "technology": [
        "The new {laptop|compiler|phone|processor|operating system}"
        " {needs half the memory of|runs faster than|fixes a bug of|supports the drivers of}"
        " {its predecessor|the version of last spring|the test release|its rivals}",
        "Engineers {released|patched|published|benchmarked}"
        " a {network driver|neural network|database|web browser|chip}"
        " that {uses less power|encrypts every message|runs on one graphics card|loads pages in parallel}",
        "新款{处理器|手机|笔记本电脑|显卡|操作系统}{采用三纳米工艺|内存翻倍|支持无线充电|功耗降低一半|修复了漏洞}，{下月上市|性能提升明显|售价尚未公布|程序员可抢先测试}",
        "工程师{发布|升级|开源|测试}了{数据库软件|神经网络模型|网络驱动|浏览器内核}，{速度快了三成|代码可免费下载|支持并行计算|所有消息均加密}",
    ],
    "travel": [
        "We {took the night train|flew|cycled|sailed|drove}"
        " to {the old harbour|a village in the mountains|Lisbon|Kyoto|the island}"
        " and {stayed in a small hotel|visited two museums|lost our luggage|walked along the city wall}",
        "The {ferry|guided tour|bus ticket|hiking trail|flight}"
        " to {the castle|the southern beaches|the lake|the capital|the temple}"
        " {must be booked in advance|takes three hours|starts at platform two|costs nothing for children}",
        "我们{坐夜车|乘飞机|骑自行车|坐船|自驾}去{古城|海边的小岛|桂林|山里的村庄|敦煌}，{住在一家民宿|参观了两座博物馆|拍了很多照片|沿着城墙散步}",
        "{去灯塔|前往首都|到温泉|环湖|进山}的{旅游专线|船票|航班|徒步路线|导游团}{需要提前预订|全程三小时|儿童免票|从二号站台出发|周一停运}",
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
            pattern = patterns[len(texts) % len(patterns)]
            texts[re.sub(r"{(.*?)}", lambda slot: chance.choice(slot[1].split("|")), pattern)] = None
        lines += [f"{label}\t{text}\n" for text in texts]
    chance.shuffle(lines)
    for name, count in NUMBERS.items():
        (folder / f"{name}.txt").write_text("".join(lines[:count]), encoding="utf-8")
        del lines[:count]


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "texts")
